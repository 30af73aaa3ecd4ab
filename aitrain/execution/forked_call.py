"""Runs a function in a forked copy of this process, which cannot change this one: not its objects, not its random
numbers, not its working directory."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from aitrain import activity
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.processes import end_with, fork


def forked(function: Callable[[Connection], object], seconds: float) -> Iterator[Any]:
    """What `function` sends on its connection from a forked process, until it returns or the time is over. What the
    process prints is dropped, and it ends with its process group.

    Raises:
        CallFailed: the process ended before.
        OSError: no process can be forked.
    """
    ours, theirs = Pipe(duplex=False)
    pid = fork(partial(_run, function, theirs, os.getpid()))
    with suppress(OSError):  # the process does the same: one of the two is first
        os.setpgid(pid, pid)
    theirs.close()
    end = time.monotonic() + seconds
    with ours:
        try:
            while ours.poll(max(0.0, end - time.monotonic())) and (message := ours.recv()) is not None:
                yield message
        except EOFError:
            raise CallFailed(Failure("crashed", "ended without a result")) from None
        finally:
            for kill in (os.killpg, os.kill):
                with suppress(OSError):
                    kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run(function: Callable[[Connection], object], connection: Connection, parent: int) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)  # so that what the function starts is ended with it
    end_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    # a notebook has streams of its own
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stdout
    activity.own.memory = bytearray(activity.own.memory)  # the parent's is shared with the watchdog
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # OpenMP's threads were not copied, and waiting for them would never end
    function(connection)
    connection.send(None)
