"""All errors of aitrain, in one tree, with the exit code of each branch.

    AitrainError                    base class of everything that aitrain raises by itself
        ConfigError             2   the command, an option, or a file that an option names is wrong
        EnvironmentFailed       3   the user's environment cannot be used, or stopped working
            AbsentModelError        the environment uses a model that is not there; defined in environment/runner.py
            EpisodesFailed          too many episodes failed, in batches in a row or in an evaluation
        RunFailed               1   training itself failed
            CannotWriteError        the disk is full or read-only
            DivergedError           loss, gradients or weights are NaN or inf
            ServerFailed            a vLLM server failed one process; raised on all of them
            ServerRefusedError      a vLLM server answered a request with a 4xx status
        WorseError              4   compare --fail-if-worse: a model is worse; reproduce: a run is not the same
        Interrupted             130 Ctrl-C or SIGTERM ended the run
        ActionRefusedError          an OpenEnv server cannot read an action; defined in adapters/openenv.py
        CallFailed                  a call of the environment failed; defined in execution/failure.py
        CheckpointDamagedError      a file of a checkpoint is missing or was changed
        EpisodeTruncated            a limit ended the episode of an environment that runs its own loop
        NotCheckedError             a check of an environment cannot run; defined in workbench/check/subject.py
        OutOfRepliesError           a scripted policy has no further reply; defined in rollout/engine.py
        RefusedRequestError         what our servers refuse, and why; defined in environment/http_server.py
        ServerGoneError             no vLLM server answers, or its engine is dead

The last eight are caught and turned into something that a user sees. A message says what happened, where, and what
to do next, in at most five lines.
"""

import errno
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

__all__ = ["AitrainError", "ConfigError", "EnvironmentFailed", "EpisodeTruncated", "Interrupted", "RunFailed"]


class AitrainError(Exception):
    """Base class of all errors of aitrain; its text is one short message for the user."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of the traceback: the lines of the user's code, and the message."""
        from aitrain.cells import name_cells, users_lines  # here, because only notebooks need it

        return [*users_lines(self), name_cells(f"{type(self).__name__}: {self}")]


class ConfigError(AitrainError):
    """The command, an option, or a file that an option names is wrong; nothing was started."""

    exit_code = 2


class EnvironmentFailed(AitrainError):
    """The environment cannot be loaded, breaks the contract, or fails too often to train on."""

    exit_code = 3


class EpisodesFailed(EnvironmentFailed):
    """Too many episodes failed, in batches in a row or in an evaluation; raised between two steps, on all processes
    together."""


class RunFailed(AitrainError):
    """Training was started and failed for a reason that is neither the user's command nor the environment."""

    exit_code = 1


class EpisodeTruncated(AitrainError):
    """A limit ended the episode (tokens, turns or the context); raised in `rollout`, which may catch it and return a
    score."""


class CannotWriteError(RunFailed):
    """The disk is full or read-only, so that nothing else can be saved either."""


class DivergedError(RunFailed):
    """Loss, gradients or weights are NaN or inf for good; raised on all processes in the same step."""

    def __init__(self, message: str, has_finite_weights: bool) -> None:
        super().__init__(message)
        self.has_finite_weights = has_finite_weights


class ServerFailed(RunFailed):
    """A vLLM server gave no completions, or took no weights, for one process; raised on all processes together."""


class ServerRefusedError(RunFailed):
    """A vLLM server that works refused a request; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerGoneError(AitrainError):
    """No vLLM server answers, or it answers that its engine is dead."""


class WorseError(AitrainError):
    """A model is worse than the one that it is compared with (`aitrain compare --fail-if-worse`), or a run is not the
    same as the one that it repeats (`aitrain reproduce`)."""

    exit_code = 4


class Interrupted(AitrainError):
    """Ctrl-C or SIGTERM ended the run."""

    exit_code = 130


class CheckpointDamagedError(AitrainError):
    """A folder is not a complete checkpoint; the text is the reason in a few words."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean x?` for the known word nearest to a misspelt one; empty if none is near."""
    if not word:
        return ""
    size = len(word)
    wrong = 0 if size < 3 else 1 if size < 8 else 2  # letters
    folded = {other.casefold(): other for other in known if abs(len(other) - size) <= wrong}
    near = get_close_matches(word.casefold(), folded, 1, (size - wrong) / size)
    return f" Did you mean {folded[near[0]]}?" if near else ""


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Context whose errors name the environment, if it has a name."""
    try:
        yield
    except AitrainError as error:
        if name:
            first, *rest = str(error).split("\n")
            error.args = ("\n".join([f"{first.removesuffix('.')} (environment {name})", *rest]), *error.args[1:])
        raise


WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO}
"""System errors that mean that a file cannot be written."""


def to_aitrain_error(error: BaseException) -> AitrainError:
    """An AitrainError unchanged; any other exception as an AitrainError with its message on one line."""
    if isinstance(error, AitrainError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("Stopped.")
    if isinstance(error, OSError) and error.errno in WRITE_ERRORS:
        where = f" {error.filename}" if error.filename else ""
        return RunFailed(
            f"Cannot write{where}: {error.strerror}\nFree some disk space. Everything saved before is intact."
        )
    return RunFailed(f"Training failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


def write_error_file(error: AitrainError) -> None:
    """Tell torchrun why this process fails, in the file that it has named. No-op without it."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        more = {"py_callstack": str(error), "timestamp": str(int(time.time()))}
        with suppress(OSError):
            partial = Path(f"{file}.partial")  # torchrun restarts nothing if it reads half a file
            partial.write_text(json.dumps({"message": {"message": str(error), "extraInfo": more}}), encoding="utf-8")
            partial.replace(file)


def no_file(place: str | Path) -> str:
    """`there is no file env.py (looked from FOLDER).`, and the file beside it with nearly that name."""
    file = Path(os.path.expanduser(place))
    near = did_you_mean(file.name, [other.name for other in file.parent.glob("*" + file.suffix) if other.is_file()])
    return f"there is no file {place} (looked from {Path.cwd()}).{near}"
