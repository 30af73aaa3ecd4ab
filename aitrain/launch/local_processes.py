"""The training processes of this machine: one child for each rank, started directly.

Compared with torchrun there is no process between, so a start takes a second less, a rank that is killed is known by
its number and signal, and nothing waits for a rendezvous that is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from aitrain.launch.preflight import RunPlan
from aitrain.runs.new_folder import LOCK_VARIABLE
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.watchdog import descendants

PYTHON = [sys.executable, "-P"]
"""`-P` keeps the working directory off the path: a folder named `vllm` there must not hide the library."""
WORKER = "aitrain.jobs.worker"
MOST_LOG, KEPT_LOG = 64 << 20, 8 << 20
"""Bytes at which a log is cut, and of its beginning and its end that are kept."""
CUT = b"[aitrain left out the middle of this log: more was printed than is kept]\n"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables from which torch's `env://` knows the other processes."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of this machine, `first` to `first + count - 1` of `world`, and where all ranks meet."""

    count: int = 1
    first: int = 0
    world: int = 1
    address: str = "127.0.0.1"
    port: int = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.count))


def worker_command(plan: RunPlan, folder: RunFolder, checkpoint: Path | None) -> list[str]:
    """The command of a training process; all ranks have the same one."""
    arguments = [str(folder.path), str(folder.epoch), *([str(checkpoint)] if checkpoint else [])]
    if plan.config.resume_anyway and checkpoint:
        arguments.append("anyway")
    return [*PYTHON, "-m", WORKER, *arguments]


def rank_variables(ranks: Ranks, rank: int) -> dict[str, str]:
    """Environment variables by which a rank knows the others; none if it is alone."""
    if ranks.world == 1:
        return {}
    numbers = (rank, rank - ranks.first, ranks.world, ranks.count, ranks.address, ranks.port)
    return dict(zip(RANK_VARIABLES, map(str, numbers), strict=True))


@contextmanager
def reserved_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A free port on which rank 0 can listen until the end of the block, and which no other program is given.

    The socket is bound and does not listen, so a process that sets SO_REUSEADDR, as torch does, can listen there.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
        yield held.getsockname()[1]


@contextmanager
def kept_short(log: Path, every: float = 0.25) -> Iterator[None]:
    """Cut a log that processes append to whenever it has grown too large: its beginning and its end are kept."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(every):
            cut(log)

    thread = threading.Thread(target=watch, name="log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        cut(log)


def cut(log: Path) -> None:
    """Cut a log if it is too large, in place, as processes hold it open; lines that they append just then are lost."""
    with suppress(OSError), log.open("r+b") as file:
        if file.seek(0, os.SEEK_END) <= MOST_LOG:
            return
        file.seek(-KEPT_LOG, os.SEEK_END)
        end = file.read()
        file.seek(0)
        file.seek(file.read(KEPT_LOG).rfind(b"\n") + 1 or KEPT_LOG)  # whole lines, in which secrets are masked later
        file.write(CUT + end[end.find(b"\n") + 1 :])
        file.truncate()


@dataclass
class LocalProcesses:
    """The running training processes of this machine."""

    on_exit: Callable[[int, int], None]
    """Called with rank and exit code of each process that ended, in a thread."""
    children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    """By rank."""
    _output: int = -1
    _waiting: list[threading.Thread] = field(default_factory=list)

    def start(
        self, command: list[str], variables: Mapping[str, str], ranks: Ranks, log: TextIO, lock: int | None = None
    ) -> None:
        """Start one process for each rank. All write events to the same pipe, and inherit the run folder's lock.

        Each is in a session of its own, so that Ctrl-C reaches only the parent, which forwards it.
        """
        self._output, writing = os.pipe()
        inherited = {} if lock is None else {LOCK_VARIABLE: str(lock)}
        try:
            for rank in ranks:
                self.children[rank] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=writing,
                    stderr=log,
                    env={**variables, **rank_variables(ranks, rank), **inherited},
                    pass_fds=() if lock is None else (lock,),
                    start_new_session=True,
                )
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(writing)
        for rank, child in self.children.items():
            thread = threading.Thread(target=self._wait, args=(rank, child), name=f"rank-{rank}", daemon=True)
            self._waiting.append(thread)
            thread.start()

    def lines(self) -> Iterator[str]:
        """What they write, until all of them have closed the pipe."""
        with open(self._output, encoding="utf-8", errors="replace") as file:
            yield from file

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each of them."""
        for child in self.children.values():
            child.send_signal(number)  # no-op for one that has ended

    def kill(self) -> None:
        """SIGKILL to each of them and its descendants (environment processes, engines), by id, as these may be in
        other sessions."""
        pids = [child.pid for child in self.children.values() if child.poll() is None]
        _send(pids, signal.SIGSTOP)  # one that is halted starts no more processes, which would be left
        _send([*pids, *descendants(pids)], signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Wait for all of them to end, and for their `on_exit`; kill those that have not ended by then."""
        deadline = time.monotonic() + seconds
        for thread in self._waiting:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._waiting):
            self.kill()
            for thread in self._waiting:
                thread.join()

    def _wait(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        self.on_exit(rank, child.wait())


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def how_it_ended(rank: int, world: int, code: int) -> str:
    """`Rank 1 of 2 was ended by SIGKILL (out of memory?)`, from an exit code."""
    who = "The training process" if world == 1 else f"Rank {rank} of {world}"
    if code >= 0:
        return f"{who} ended without an error message: exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"{who} ended without an error message: {signal.Signals(-code).name}{hint}"
