"""The training processes of this machine: one for each rank, ended with all that it has started.

Compared with torchrun a start takes a second less, a rank that is killed is known by its number and signal, and nothing
waits for a rendezvous that is gone.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aitrain.events import STORE_VARIABLE
from aitrain.execution.process_tree import ProcessTree
from aitrain.launch.machines import RANK_VARIABLES
from aitrain.launch.preflight import RunPlan
from aitrain.redaction import RedactedLog
from aitrain.runs.new_folder import LOCK_VARIABLE
from aitrain.runs.run_folder import RunFolder

PYTHON = [sys.executable, "-P"]
"""`-P` keeps the working directory off the path: a folder named `vllm` there must not hide the library."""
WORKER = "aitrain.jobs.worker"
ALL_HAVE_ENDED = "\0\n"
"""The last line of the processes' output, which is ours."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of this machine, `first` to `first + count - 1` of `world`, and where all ranks meet."""

    count: int = 1
    first: int = 0
    world: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    has_store: bool = False
    """Whether torch's store is there already; else rank 0 runs it."""

    only: int | None = None
    """The rank of this parent, where each rank of the machine has one of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.count) if self.only is None else [self.only])


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
    named = dict(zip(RANK_VARIABLES, map(str, numbers), strict=True))
    return {**named, "TORCHELASTIC_USE_AGENT_STORE": str(ranks.has_store)}


def inherited_files(rank: int, lock: int | None, listener: socket.socket | None) -> dict[str, int]:
    """The files that a process inherits, by the variable that names each: the run folder's lock, and for the first one
    the socket on which it runs torch's store."""
    files = {} if lock is None else {LOCK_VARIABLE: lock}
    return files if listener is None or rank > 0 else {**files, STORE_VARIABLE: listener.fileno()}


@dataclass
class LocalProcesses:
    """The running training processes of this machine."""

    on_exit: Callable[[int, int | None], None]
    """Called with rank and exit code of each process that ended, in a thread."""
    trees: dict[int, ProcessTree] = field(default_factory=dict)
    """By rank."""
    _reading: int = -1
    _writing: int = -1
    """The ends of the pipe for events. This process keeps both, for the last line."""
    _waiting: list[threading.Thread] = field(default_factory=list)

    def start(
        self,
        command: list[str],
        variables: Mapping[str, str],
        ranks: Ranks,
        log: RedactedLog,
        lock: int | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        """Start one process for each rank. All write events to the same pipe, and inherit the run folder's lock; the
        first one runs torch's store on `listener`.

        Each is in a session of its own, so that Ctrl-C reaches only the parent, which forwards it; if the parent is
        killed, they finish their step, save and leave.
        """
        self._reading, self._writing = os.pipe()
        try:
            for rank in ranks:
                files = inherited_files(rank, lock, listener)
                numbers = {name: str(file) for name, file in files.items()}
                own = {**variables, **rank_variables(ranks, rank), **numbers}
                self.trees[rank] = ProcessTree(
                    command,
                    math.inf,
                    env=own,
                    stdout=self._writing,
                    stderr=log.pipe,
                    pass_fds=tuple(files.values()),
                )
        except BaseException:
            self.kill()
            raise
        for rank, tree in self.trees.items():
            thread = threading.Thread(target=self._wait, args=(rank, tree), name=f"rank-{rank}", daemon=True)
            self._waiting.append(thread)
            thread.start()
        threading.Thread(target=self._write_last_line, name="ranks", daemon=True).start()

    def lines(self) -> Iterator[str]:
        """What they write, until all of them have ended: a process that cannot be ended may keep the pipe open."""
        with open(self._reading, encoding="utf-8", errors="replace") as file:
            yield from iter(file.readline, ALL_HAVE_ENDED)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each of them."""
        for tree in self.trees.values():
            tree.send(number)

    def kill(self) -> None:
        """SIGKILL to each of them, and to all that they have started (environment processes, engines)."""
        for tree in self.trees.values():
            tree.kill()

    def wait(self, seconds: float) -> None:
        """Wait for all of them to end, and for their `on_exit`; kill those that have not ended by then."""
        deadline = time.monotonic() + seconds
        for thread in self._waiting:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._waiting):
            for tree in self.trees.values():
                tree.close()
            for thread in self._waiting:
                thread.join()

    def _wait(self, rank: int, tree: ProcessTree) -> None:
        self.on_exit(rank, tree.wait_for_program())
        tree.wait()

    def _write_last_line(self) -> None:
        for thread in self._waiting:
            thread.join()
        with suppress(BrokenPipeError), os.fdopen(self._writing, "wb") as pipe:
            pipe.write(f"\n{ALL_HAVE_ENDED}".encode())


def how_it_ended(rank: int, world: int, code: int | None) -> str:
    """`Rank 1 of 2 was ended by SIGKILL (out of memory?)`, from an exit code, which only its launcher may know."""
    who = "The training process" if world == 1 else f"Rank {rank} of {world}"
    if code is None:
        return f"{who} ended without an error message: see the output of its launcher"
    if code >= 0:
        return f"{who} ended without an error message: exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"{who} ended without an error message: {signal.Signals(-code).name}{hint}"
