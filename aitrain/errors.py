"""What can go wrong for a user: one family, one exit code each.

    AitrainError            anything that aitrain itself reports
        ConfigError         2   the command, an option or a file it names is wrong
        EnvironmentFailed   3   the user's environment cannot be used, or stopped working
        RunFailed           1   training itself failed
        Interrupted         130 somebody asked the run to stop

A message says what happened, where, and what to do next, in at most five lines.
"""

import errno
from collections.abc import Iterable

__all__ = ["AitrainError", "ConfigError", "EnvironmentFailed", "Interrupted", "RunFailed"]


class AitrainError(Exception):
    """Anything that aitrain reports to a user as one short message."""

    exit_code = 1


class ConfigError(AitrainError):
    """The command, an option, or a file that an option names is wrong: nothing was started."""

    exit_code = 2


class EnvironmentFailed(AitrainError):
    """The environment cannot be loaded, breaks the contract, or fails too often to train on."""

    exit_code = 3


class RunFailed(AitrainError):
    """Training was started and failed for a reason that is not the user's command or environment."""

    exit_code = 1


class Interrupted(AitrainError):
    """Ctrl-C or SIGTERM ended the run."""

    exit_code = 130


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean x?` for the known word that a misspelt one is nearest to; empty where none is near."""
    allowed = 0 if len(word) < 3 else 1 if len(word) < 8 else 2
    edits = {other: _edits(word.casefold(), other.casefold()) for other in known if abs(len(other) - len(word)) <= 2}
    near = min(edits, key=lambda other: edits[other], default="")
    return f" Did you mean {near}?" if near and edits[near] <= allowed else ""


def _edits(word: str, other: str) -> int:
    """Letters to insert, remove, replace or swap with their neighbours, to turn one word into another."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(word, 1):
        before, last, row = row, before, [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted)))
            if last and j > 1 and (letter, word[i - 2]) == (other[j - 2], wanted):
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1]


NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}
"""What the system says when a file cannot be written any more."""


def as_ours(error: BaseException) -> AitrainError:
    """The error itself when it is one of ours; what a library raised as RunFailed, on one line."""
    if isinstance(error, AitrainError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("Stopped.")
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        where = f" {error.filename}" if error.filename else ""
        return RunFailed(f"Cannot write{where}: {error.strerror}\nMake room. What was saved before is whole.")
    return RunFailed(f"Training failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
