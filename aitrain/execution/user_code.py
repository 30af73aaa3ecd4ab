"""Finds the line of the user's code that failed or hangs, and describes errors in one message."""

from __future__ import annotations

import builtins
import functools
import inspect
import re
import sys
import threading
import traceback
from collections.abc import Awaitable, Iterator
from pathlib import Path
from traceback import FrameSummary, StackSummary
from types import FrameType

from aitrain.errors import did_you_mean
from aitrain.packages import BUNDLED, PACKAGE


def failure_message(what: str, error: BaseException) -> str:
    """Message such as `score_episode raised: ValueError: no such city`, with the user's line and, if known, advice."""
    first = first_of_group(error)
    return "\n".join(line for line in (f"{what}: {describe_error(error)}", _where(first), _remedy(first)) if line)


def describe_error(error: BaseException) -> str:
    """Type and message on one line of at most 300 characters: `ValueError: no such city`."""
    first = first_of_group(error)
    text = " ".join(str(first).split())
    others = f" (the first error of an {type(error).__name__})" if first is not error else ""
    return f"{type(first).__name__}: {text}"[:300].rstrip(": ") + others


def first_of_group(error: BaseException) -> BaseException:
    """The first error of an ExceptionGroup, such as that of a TaskGroup, whose own text does not say what failed."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _where(error: BaseException) -> str:
    """The line of the user's code that failed: `at hotel.py, line 12, in score_episode: return 1 / 0`. If a
    library's error was caused by one of the user's, the line of that one, after its description."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"at {error.filename}, line {error.lineno}: {(error.text or '').strip()}"
    for cause in _causes(error):
        stack = traceback.extract_tb(cause.__traceback__)
        if any(is_users_file(frame.filename) for frame in stack):
            return ("" if cause is error else f"caused by {describe_error(cause)}\n") + users_line(stack)
    return users_line(traceback.extract_tb(error.__traceback__))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, the one that caused it, and so on."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield first_of_group(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def users_line(stack: traceback.StackSummary) -> str:
    """Innermost line of the user's code in a stack, else of a library; empty if there is neither."""
    frames = [frame for frame in stack if not _is_machinery(frame.filename)]
    own = [frame for frame in frames if not _is_library(frame.filename)] or frames
    if not own:
        return ""
    return f"at {own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: {own[-1].line}"[:300]


@functools.lru_cache(maxsize=1024)
def is_users_file(filename: str) -> bool:
    """Whether a file is the user's code, as opposed to Python's, a library's or aitrain's."""
    return not _is_machinery(filename) and not _is_library(filename)


own_files: set[str] = set()
"""Files that aitrain writes in this process, also during calls of the environment, which they are no state of."""


NEEDS_TERMINAL = "needs a terminal, and a training has none: aitrain env play has one."
REMEDIES = {
    "BdbQuit": f"breakpoint() {NEEDS_TERMINAL}",  # of the debugger
    "EOFError: EOF when reading a line": f"input() {NEEDS_TERMINAL}",
    "ImportError: attempted relative import": "Name it as a module: --rl-env-module package.module",
    "SystemExit: 2": "If it reads the command line, which is aitrain's: take settings as arguments of the constructor"
    " (--rl-env-config).",  # of argparse
}
"""What to do, by the beginning of the description of an error."""


def _remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"Install {error.name}, or correct the import."
    if isinstance(error, FileNotFoundError) and isinstance(error.filename, (str, Path)) and error.filename:
        return "" if Path(error.filename).is_absolute() else f"Looked for it from {Path.cwd()}."
    if isinstance(error, (NameError, AttributeError)) and isinstance(error.name, str):
        return did_you_mean(error.name, _names_beside(error)).strip()
    return next((text for start, text in REMEDIES.items() if describe_error(error).startswith(start)), "")


def _names_beside(error: NameError | AttributeError) -> list[str]:
    """The names that the failing line could have used instead."""
    try:
        if isinstance(error, AttributeError):
            return dir(error.obj)
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    except Exception:  # of the user's __dir__, or there is no traceback
        return []
    return [*frame.f_locals, *frame.f_globals, *vars(builtins)]


def _is_machinery(filename: str) -> bool:
    """Whether a file belongs to aitrain, the import system or the standard library."""
    path = Path(filename)
    if path.is_relative_to(BUNDLED):
        return False
    is_standard = path.is_relative_to(Path(traceback.__file__).parent) and not _is_library(filename)
    return is_standard or filename.startswith("<frozen") or path.is_relative_to(PACKAGE)


def _is_library(filename: str) -> bool:
    """Whether a file is in site-packages, where a user's environment may be installed, too."""
    return "site-packages" in filename and not Path(filename).is_relative_to(BUNDLED)


LOOP_THREAD = "environment-loop"
"""Name of the threads of event loops, see `async_calls`."""
_DUMPED_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def stack_of_thread(thread: threading.Thread | None) -> StackSummary:
    """The present stack of a thread, outermost frame first."""
    return StackSummary.extract(iter(_thread_frames(sys._current_frames().get((thread and thread.ident) or 0))))


def stack_of_awaitable(awaitable: Awaitable[object]) -> StackSummary:
    """The frames that a coroutine awaits; if it blocks its thread, or another one does so that it cannot begin, those
    of the thread."""
    frames: list[tuple[FrameType, int]] = []
    inner: object = awaitable
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        inner = getattr(inner, "cr_await", None)
    is_new = inspect.iscoroutine(awaitable) and inspect.getcoroutinestate(awaitable) == inspect.CORO_CREATED
    loops = [thread for thread in threading.enumerate() if thread.name == LOOP_THREAD]
    for thread in reversed(loops):  # the newest one first, as a loop that was blocked for good is replaced
        stack = _thread_frames(sys._current_frames().get(thread.ident or 0))
        if is_new or any(frame is frames[-1][0] for frame, _ in stack if frames):
            return StackSummary.extract(iter(stack))
    return StackSummary.extract(iter(frames))


def _thread_frames(innermost: FrameType | None) -> list[tuple[FrameType, int]]:
    return list(traceback.walk_stack(innermost))[::-1] if innermost else []


def stack_of_dump(dump: str, entry: tuple[str, str]) -> StackSummary:
    """The stack of the thread that runs the user's code (main thread or event loop), from a faulthandler dump.

    Frames up to the function `entry` (file, name) are left out.
    """
    threads = sorted(dump.split("\n\n"), key=lambda thread: not thread.startswith("Current"))
    stacks = [_dumped_stack(thread, entry) for thread in threads]
    return next((stack for stack in stacks if users_line(stack)), stacks[0])


def _dumped_stack(thread: str, entry: tuple[str, str]) -> StackSummary:
    frames = [
        (file.encode().decode("unicode_escape"), int(line), name)
        for file, line, name in reversed(_DUMPED_FRAME.findall(thread))
    ]
    entries = [place for place, frame in enumerate(frames) if (frame[0], frame[2]) == entry]
    del frames[: max(entries, default=-1) + 1]
    return StackSummary.from_list([FrameSummary(*frame) for frame in frames])
