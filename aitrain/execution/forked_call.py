"""Calls a function in a forked copy of this process, which cannot change this one: not its objects, not its random
numbers, not its working directory."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

from aitrain import activity
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.processes import end_with, fork

SECONDS_TO_DIE = 5.0
"""How long a killed process is waited for: one that waits for a device may take longer."""


@dataclass(frozen=True)
class Answer:
    """Sends a JSON value to the caller, which then ends the forked process; call it in any of its threads."""

    connection: Connection

    def __call__(self, value: object) -> NoReturn:
        """Send, and wait for the end: what this process has started is found as long as it lives."""
        self.connection.send_bytes(json.dumps(value).encode())
        time.sleep(SECONDS_TO_DIE)
        os._exit(0)


def call_forked(function: Callable[[Answer], object], seconds: float) -> object:
    """The JSON value that `function` returns, or gives to its argument, in a forked process; what the process prints is
    dropped, and it ends with what it started when the value is there or the time is over.

    Raises:
        CallFailed: it gave no value within `seconds` (timed_out), or ended without one (crashed).
        OSError: no process can be forked.
    """
    ours, theirs = Pipe(duplex=False)
    pid = fork(partial(_run, function, theirs, os.getpid()))
    with suppress(OSError):  # the process does the same: one of the two is first
        os.setpgid(pid, pid)
    theirs.close()
    with ours:
        try:
            if not ours.poll(seconds):
                raise CallFailed(Failure("timed_out", f"took more than {seconds:g} seconds"))
            return json.loads(ours.recv_bytes())
        except EOFError:
            raise CallFailed(Failure("crashed", "ended without a result")) from None
        finally:
            _end(pid)


def _end(pid: int) -> None:
    """Kill the process and all that it started, also those that left its process group."""
    import psutil  # here, because its import takes long

    started = []
    with suppress(psutil.Error):  # it has ended
        started = psutil.Process(pid).children(recursive=True)
    for kill in (os.killpg, os.kill):
        with suppress(OSError):
            kill(pid, signal.SIGKILL)
    for process in started:
        with suppress(psutil.Error):
            process.kill()
    end = time.monotonic() + SECONDS_TO_DIE
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < end:
        time.sleep(0.002)


# -- in the forked process


def _run(function: Callable[[Answer], object], connection: Connection, parent: int) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)  # so that what the function starts is ended with it
    end_with(parent)
    if sys.platform == "linux":
        pr_set_child_subreaper = 36  # what it starts stays its descendant, also if it is a daemon
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    _drop_output()
    activity.own.memory = bytearray(activity.own.memory)  # the parent's is shared with the watchdog
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # OpenMP's threads were not copied, and waiting for them would never end

    answer = Answer(connection)
    answer(function(answer))


def _drop_output() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    # a notebook has streams of its own
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stdout
