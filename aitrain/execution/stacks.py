"""Stacks of code that runs elsewhere: in another thread, on an event loop, in another process."""

from __future__ import annotations

import re
import sys
import threading
import traceback
from collections.abc import Awaitable
from traceback import FrameSummary, StackSummary
from types import FrameType

from aitrain.execution.user_code import users_line

_DUMPED_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def stack_of_thread(thread: threading.Thread) -> StackSummary:
    """The present stack of a thread, outermost frame first."""
    return StackSummary.extract(iter(_thread_frames(sys._current_frames().get(thread.ident or 0))))


def stack_of_awaitable(awaitable: Awaitable[object]) -> StackSummary:
    """The frames that a coroutine awaits; if it blocks its thread, those of the thread."""
    frames: list[tuple[FrameType, int]] = []
    inner: object = awaitable
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        inner = getattr(inner, "cr_await", None)
    for innermost in sys._current_frames().values() if frames else ():
        thread = _thread_frames(innermost)
        if any(frame is frames[-1][0] for frame, _ in thread):
            return StackSummary.extract(iter(thread))
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
    frames = [(_unescaped(file), int(line), name) for file, line, name in reversed(_DUMPED_FRAME.findall(thread))]
    entries = [place for place, frame in enumerate(frames) if (frame[0], frame[2]) == entry]
    del frames[: max(entries, default=-1) + 1]
    return StackSummary.from_list([FrameSummary(*frame) for frame in frames])


def _unescaped(name: str) -> str:
    return name.encode("ascii").decode("unicode_escape") if "\\" in name else name
