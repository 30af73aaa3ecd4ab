"""Which line of the user's own code failed or hangs, and how it is told."""

from __future__ import annotations

import functools
import traceback
from pathlib import Path

from aitrain.packages import BUNDLED, PACKAGE


def failure_message(what: str, error: BaseException) -> str:
    """`score_episode raised: ValueError: no such city`, the user's own line, and what to do where we know it."""
    return "\n".join(line for line in (f"{what}: {describe(error)}", _where(error), _remedy(error)) if line)


def describe(error: BaseException) -> str:
    """`ValueError: no such city`, on one line, not too long."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300].rstrip(": ")


def _where(error: BaseException) -> str:
    """The user's own line that failed: `at hotel.py, line 12, in score_episode: return 1 / 0`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"at {error.filename}, line {error.lineno}: {(error.text or '').strip()}"
    return users_line(traceback.extract_tb(error.__traceback__))


def users_line(stack: traceback.StackSummary) -> str:
    """The innermost line of the user's own in a stack, or of a library where there is none; empty without either."""
    frames = [frame for frame in stack if not _is_machinery(frame.filename)]
    own = [frame for frame in frames if not _is_library(frame.filename)] or frames
    if not own:
        return ""
    return f"at {own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: {own[-1].line}"[:300]


@functools.lru_cache(maxsize=1024)
def is_users_file(filename: str) -> bool:
    """Whether code in this file is the user's own, and not Python's, a library's or aitrain's."""
    return not _is_machinery(filename) and not _is_library(filename)


def _remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"Install {error.name}, or correct the import."
    if isinstance(error, ImportError) and "no known parent package" in str(error):
        return "Name it as a module, so that Python knows its package: --rl-env-module package.module"
    return ""


def _is_machinery(filename: str) -> bool:
    """Between the user's code and us: aitrain itself, Python's import system and its standard library."""
    path = Path(filename)
    if path.is_relative_to(BUNDLED):
        return False
    return filename.startswith("<frozen") or path.is_relative_to(PACKAGE) or _is_standard(path)


def _is_standard(path: Path) -> bool:
    return path.is_relative_to(Path(traceback.__file__).parent) and not _is_library(str(path))


def _is_library(filename: str) -> bool:
    """Installed; an environment may be installed too, so that its lines are better than none."""
    return "site-packages" in filename and not Path(filename).is_relative_to(BUNDLED)
