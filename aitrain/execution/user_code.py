"""Finds the line of the user's code that failed or hangs, and describes errors in one message."""

import re
import sys
import threading
import traceback
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from traceback import FrameSummary, StackSummary
from types import FrameType

from aitrain.errors import AitrainError, EnvironmentFailed
from aitrain.packages import is_library, is_machinery


def failure_message(what: str, error: BaseException) -> str:
    """Message such as `score_episode raised: ValueError: no such city`, with the user's line."""
    stack = traceback.extract_tb(first_of_group(error).__traceback__)
    return f"{what}: {describe_error(error)}\n{users_line(stack)}".rstrip()


@contextmanager
def users_errors(what: str) -> Iterator[None]:
    """Context in which the user's code runs: what it raises is an EnvironmentFailed with its line; an error of aitrain
    says by itself what is wrong."""
    try:
        yield
    except AitrainError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(failure_message(what, error)) from error


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


def users_line(stack: traceback.StackSummary) -> str:
    """Innermost line of the user's code in a stack, else of a library; empty if there is neither:
    `at hotel.py, line 12, in score_episode: return 1 / 0`."""
    frames = [frame for frame in stack if not is_machinery(frame.filename)]
    own = [frame for frame in frames if not is_library(frame.filename)] or frames
    if not own:
        return ""
    return f"at {own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: {own[-1].line}"[:300]


own_files: set[str] = set()
"""Files that aitrain writes in this process, also during calls of the environment, which they are no state of."""


_DUMPED_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def stack_of_thread(thread: threading.Thread) -> StackSummary:
    """The present stack of a thread, outermost frame first."""
    innermost = sys._current_frames().get(thread.ident or 0)
    return traceback.extract_stack(innermost) if innermost else StackSummary()


def stack_of_awaitable(awaitable: Awaitable[object]) -> StackSummary:
    """The frames that a coroutine awaits, or is in."""
    frames: list[tuple[FrameType, int]] = []
    inner: object = awaitable
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        inner = getattr(inner, "cr_await", None)
    return StackSummary.extract(iter(frames))


def stack_of_dump(dump: str, entry: tuple[str, str]) -> StackSummary:
    """The stack of the thread that runs the user's code (main thread or event loop), from a faulthandler dump.

    Frames up to the function `entry` (file, name) are left out.
    """
    stacks = []
    for thread in sorted(dump.split("\n\n"), key=lambda thread: not thread.startswith("Current")):
        frames = (  # innermost first
            FrameSummary(file.encode().decode("unicode_escape"), int(line), name)
            for file, line, name in _DUMPED_FRAME.findall(thread)
        )
        inside = [*takewhile(lambda frame: (frame.filename, frame.name) != entry, frames)]
        stacks.append(StackSummary.from_list(inside[::-1]))
    return next((stack for stack in stacks if users_line(stack)), stacks[0])
