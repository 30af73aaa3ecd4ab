"""Calls a function in a forked copy of this process, which cannot change this one: not its objects, not its random
numbers, not its working directory."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

from aitrain import activity
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.fork_server import end_with, fork

Answer = Callable[[object], NoReturn]
"""Sends a JSON value to the caller and ends the forked process at once, from any of its threads."""


def call_forked(function: Callable[[Answer], object], seconds: float) -> object:
    """The JSON value that `function` returns, or gives to its argument, in a forked process; what the process prints is
    dropped, and it ends with what it started when the value is there or the time is over.

    Raises:
        CallFailed: it gave no value within `seconds` (timed_out), or ended without one (crashed).
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():  # threads are not copied, and the function needs none of them
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        pid = fork(partial(_run, function, writing, os.getpid()))
    with suppress(OSError):  # the process does the same: one of the two is first
        os.setpgid(pid, pid)
    os.close(writing)
    try:
        text = _read(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        for kill in (os.killpg, os.kill):
            with suppress(OSError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if text is None:
        raise CallFailed(Failure("timed_out", f"took more than {seconds:g} seconds"))
    try:
        return json.loads(text.partition(b"\n")[0])  # a second thread may have answered as well
    except ValueError:
        raise CallFailed(Failure("crashed", "ended its process")) from None


def _read(reading: int, deadline: float) -> bytes | None:
    """What was written until the end of the line or of the process; None after the deadline."""
    text, poll = b"", select.poll()  # select takes no descriptor above 1023
    poll.register(reading, select.POLLIN)
    while not text.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        read = os.read(reading, 1 << 16)
        if not read:
            break
        text += read
    return text


# -- in the forked process


def _run(function: Callable[[Answer], object], writing: int, parent: int) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)  # so that what the function starts is ended with it
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _drop_output()
    activity.own.memory = bytearray(activity.own.memory)  # the parent's is shared with the watchdog
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # OpenMP's threads were not copied, and waiting for them would never end

    def answer(value: object) -> NoReturn:
        text = json.dumps(value).encode() + b"\n"
        while text:
            text = text[os.write(writing, text) :]
        os._exit(0)

    answer(function(answer))


def _drop_output() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    # a notebook has streams of its own
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stdout
