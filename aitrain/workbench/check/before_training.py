"""The fast checks before every training, in a forked process, which cannot change this one: not its objects, not its
random numbers, not its working directory.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from aitrain import activity
from aitrain.environment.contract import Case, env_kind, named_by
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.processes import fork, kill_group
from aitrain.execution.user_code import describe_error
from aitrain.options.train import TrainConfig
from aitrain.workbench.check.episodes import connection_watchers
from aitrain.workbench.check.registry import CHECKS, EnvCheck, run_checks
from aitrain.workbench.check.subject import NO_TIME, Subject
from aitrain.workbench.opening import OpenedEnvironment

SECONDS = 5.0
"""Seconds after which the process of the checks is ended."""
MARGIN = 0.5
"""Seconds before that after which no episode is begun."""
CASES = 4
SHOWN = 3
"""Findings that are noted."""
CUDA_IN_FORK = "Cannot re-initialize CUDA in forked subprocess"
"""Message of torch, if this process has used the GPU before it was forked."""
NEEDS_MODEL = "its scores need the model"


@dataclass
class FastCheck:
    """What the fast checks have found; `skipped` says why they did not run."""

    skipped: str = ""
    passed: int = 0
    left_out: int = 0
    """Number of checks for which there was no time."""
    findings: list[str] = field(default_factory=list)
    """The findings as sentences, without those that are only worth knowing."""
    played: int = 0
    """Number of episodes that were played."""
    all_failed: str = ""
    """The first failure, if every episode failed."""

    @property
    def is_clean(self) -> bool:
        """Whether all checks were made and have nothing to say."""
        return not (self.skipped or self.left_out or self.findings)

    def lines(self) -> Iterator[str]:
        """The findings for the user, or one line if there are none."""
        if self.skipped:
            yield f"The environment was not checked: {self.skipped}."
        elif not self.findings:
            late = f", {self.left_out} left out for lack of time" if self.left_out else ""
            yield f"Environment checks: {self.passed} passed{late}."
        yield from self.findings[:SHOWN]
        if len(self.findings) > SHOWN:
            yield f"{len(self.findings) - SHOWN} more findings about the environment: aitrain env check shows all."


def check_quickly(
    environment: object, cases: Sequence[Case], config: TrainConfig, seconds: float = SECONDS
) -> FastCheck:
    """Run the fast checks in a forked process, within a time limit. Nothing that goes wrong here ends the run.

    No answer is scored that could cost something outside of this machine's memory: the process ends before its first
    connection, and environments that ask for the model are left out.
    """
    if isinstance(environment, ServedEnvironment):
        return FastCheck(f"a server has it (aitrain env check {config.rl_env} checks it)")
    checks = [check for check in CHECKS if check.is_fast]
    try:
        names = named_by(getattr(environment, env_kind(environment)))
        if names is not None and "model" in names:
            return FastCheck(NEEDS_MODEL)
        if database := open_database():
            return FastCheck(f"it may use the open database {database}, which only the run may use")
        subject = Subject(OpenedEnvironment(environment, cases), config, limit=CASES, seconds=seconds - MARGIN)
        found: list[FastCheck] = [
            FastCheck(left_out=len(checks)),
            *forked(partial(_check, subject, checks, seconds - MARGIN), seconds),
        ]
        return found[-1]
    except Exception as error:
        return FastCheck(f"the checks failed: {describe_error(error)}")


def forked(function: Callable[[Connection], object], seconds: float) -> Iterator[Any]:
    """What `function` sends on its connection from a forked process, until it returns or the time is over. What the
    process prints is dropped, and it ends with its process group.

    Raises:
        CallFailed: the process ended before.
        OSError: no process can be forked.
    """
    ours, theirs = Pipe(duplex=False)
    pid = fork(partial(_run, function, theirs))
    theirs.close()
    end = time.monotonic() + seconds
    with ours:
        try:
            while ours.poll(max(0.0, end - time.monotonic())) and (message := ours.recv()) is not None:
                yield message
        except EOFError:
            raise CallFailed(Failure("crashed", "ended without a result")) from None
        finally:
            kill_group(pid)


def _run(function: Callable[[Connection], object], connection: Connection) -> None:
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


# -- in the forked process


def _check(subject: Subject, checks: Sequence[EnvCheck], seconds: float, connection: Connection) -> None:
    """Run the checks and send the findings after each. Send the reason and end if the environment cannot be checked
    here; this is also checked after `seconds`."""
    cuts, found = cut_connections(connection.fileno()), FastCheck(left_out=len(checks))

    def leave(reason: str) -> NoReturn:
        connection.send(FastCheck(reason))
        connection.send(None)
        os._exit(0)

    connection_watchers().append(lambda address: leave(f"it connects to {address} (aitrain env check checks it)"))

    def look() -> None:
        """Leave if the environment has done what only the run may do."""
        failures = [episode.result.failure for episode in list(subject.episodes)]
        if subject.model.used:
            leave(NEEDS_MODEL)
        if any(map(_is_used, cuts)):
            leave("it uses an open connection, which only the run may use")
        if any(failure and CUDA_IN_FORK in failure.trace for failure in failures):
            leave("its scores use the GPU, which a forked process cannot (aitrain env check can)")

    timer = threading.Timer(seconds, look)  # a call may wait for an answer from a connection that was cut
    timer.daemon = True
    timer.start()
    for result in run_checks(subject, checks):
        look()
        failures = [episode.result.failure for episode in subject.episodes]
        serious = [one for one in result.findings if one.level != "info"]
        found.left_out -= result.skipped != NO_TIME
        found.passed += not result.skipped and not result.findings
        found.findings += [
            f"Environment check {one.check}: {' '.join(f'{one.what} {one.fix}'.split())}" for one in serious
        ]
        found.played = len(failures)
        found.all_failed = failures[0].message if failures and failures[0] and all(failures) else ""
        connection.send(found)


def open_database() -> str:
    """The file of an open SQLite database, which a forked process must not touch; empty if there is none."""
    sqlite3 = sys.modules.get("sqlite3")
    if sqlite3 is None:
        return ""
    # by type: isinstance asks the object, and lazy ones import what they stand for
    for one in [found for found in gc.get_objects() if issubclass(type(found), sqlite3.Connection)]:
        with suppress(sqlite3.Error):  # closed, or of another thread
            if name := one.execute("PRAGMA database_list").fetchone()[2]:
                return str(name)
    return ""


def cut_connections(keep: int) -> list[socket.socket]:
    """Replace all inherited sockets and pipes but `keep`, as they belong to the parent; returns the other ends. What is
    written to them stays here, and whoever waits for an answer from one waits for ever."""
    ends = []
    for fd in set(map(int, os.listdir("/dev/fd"))) - {0, 1, 2, keep}:
        with suppress(OSError):  # closed meanwhile
            mode = os.fstat(fd).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                own, other = socket.socketpair()
                os.dup2(own.fileno(), fd, inheritable=False)
                own.close()
                ends.append(other)
    return ends


def _is_used(end: socket.socket) -> bool:
    """Whether something was written to a connection that was cut."""
    try:
        return bool(end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False
