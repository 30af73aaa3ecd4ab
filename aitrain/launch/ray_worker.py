"""What runs inside of a worker of Ray Train: one training process as its child.

The training process is the one of a local run. So signals, the environment's processes, which are forked before torch
is imported, and the events work as they do there: Ray calls its function outside of the main thread.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aitrain
from aitrain.activity import VARIABLE as ACTIVITY_VARIABLE
from aitrain.activity import Part, SharedMemory, Snapshot, read
from aitrain.errors import RunFailed
from aitrain.events import Ended, Failed, Started, decode
from aitrain.execution.process_tree import ProcessTree
from aitrain.launch.local_processes import Ranks, how_it_ended, rank_variables, worker_command
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import PATIENCE, process_variables
from aitrain.launch.ray_relay import Meeting, RankNews, RankPlace, Requests
from aitrain.redaction import RedactedLog
from aitrain.runs.node_info import VARIABLE as NODES_VARIABLE
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.watchdog import BYTES, ask_for_stacks, bytes_moved, waits_for_another_rank

BEAT = 0.5
"""Seconds between two messages to the command when nothing happens."""
Lines = queue.SimpleQueue[str | None]
Tell = Callable[[RankNews], Requests]


@dataclass(frozen=True)
class RankJob:
    """What each rank of a run gets from the command."""

    plan: RunPlan
    folder: RunFolder
    working_directory: str
    nonce: str
    """Name of a file in the run folder, by which a machine shows that it shares the folder."""
    relay: Any
    """Handle of the RunRelay."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables for the training processes; no secrets, as Ray may log them."""


@dataclass(frozen=True)
class RankNumbers:
    """The numbers of one rank, as Ray Train counts them."""

    rank: int
    world: int
    local: int
    local_world: int


def run_rank(config: dict[str, RankJob]) -> None:
    """The training function of Ray Train. It raises if the process was lost, so that Ray starts all ranks again; after
    an error of the run itself it returns, as that would happen again.

    Raises:
        RunFailed: the process ended without an error message.
    """
    import ray.train
    import ray.util
    from ray.train.collective import broadcast_from_rank_zero

    os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the number of reserved CPUs
    job, context = config["job"], ray.train.get_context()
    numbers = RankNumbers(
        context.get_world_rank(), context.get_world_size(), context.get_local_rank(), context.get_local_world_size()
    )
    start = broadcast_from_rank_zero(uuid.uuid4().hex if numbers.rank == 0 else None)
    place = place_of(job, numbers.rank, ray.util.get_node_ip_address())
    meeting: Meeting = ray.get(job.relay.meet.remote(start, place))
    if not meeting.problem:
        RankProcess(job, numbers, meeting).run(lambda news: ray.get(job.relay.tell.remote(news)))


def place_of(job: RankJob, rank: int, address: str) -> RankPlace:
    """This machine, and what keeps the run from starting here."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    host, problem = socket.gethostname(), ""
    if not os.path.isdir(job.working_directory):
        problem = f"{host} has no folder {job.working_directory}, where the command was started"
    elif not (job.folder.path / job.nonce).exists():
        problem = f"{host} does not share the run folder {job.folder.path}"
    if problem:
        problem += "\nEach machine of the Ray cluster needs both on a disk that all of them share."
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return RankPlace(rank, host, address, aitrain.__version__, gpus, port, problem)


@dataclass
class RankProcess:
    """The training process of one rank, from its start to its end."""

    job: RankJob
    numbers: RankNumbers
    meeting: Meeting
    requests: Requests = field(default_factory=Requests)
    seen: Snapshot = field(default_factory=lambda: Snapshot(0, Part("starting")))
    """Its last phase and progress."""
    has_reported: bool = False
    """Whether the process has said how the run ended."""
    is_silent: bool = False
    """Whether it has closed its output."""
    pid: int | None = None
    """Its id, once it has said it."""
    _moved: int = 0

    def run(self, tell: Tell) -> None:
        """Start the process, tell the command what it says, do what the command wants, and wait for the end.

        Raises:
            RunFailed: it ended without an error message, and the command did not ask for it.
        """
        memory, lines = SharedMemory(self.numbers.world), Lines()
        variables = self._variables(memory)
        log = RedactedLog(self.log, variables)
        # it gets no time if Ray kills this worker: it would train on, beside the processes of the restart
        tree = ProcessTree(
            self._command(),
            env=variables,
            stdout=subprocess.PIPE,
            stderr=log.pipe,
            cwd=self.job.working_directory,
        )
        try:
            threading.Thread(target=_read_lines, args=[tree, lines], daemon=True).start()
            while not self.is_silent:
                has_ended = tree.poll() is not None
                news = self._next_news(lines, memory)
                self._do(tell(news), tree, tell)
                if has_ended and not news.lines:
                    break  # a process that cannot be ended still holds its output
            with suppress(subprocess.TimeoutExpired):
                tree.wait(PATIENCE)
        finally:
            memory.unlink()
            code = tree.close()
            log.close()
        if code and not (self.has_reported or self.requests.stops or self.is_over):
            how = how_it_ended(self.numbers.rank, self.numbers.world, code)
            tell(RankNews(self.numbers.rank, exit=how))
            raise RunFailed(how)

    @property
    def is_over(self) -> bool:
        """Whether this start has failed on another rank."""
        return bool(self.meeting.start) and self.requests.over == self.meeting.start

    @property
    def log(self) -> Path:
        """The log of this machine's ranks: train.log where rank 0 is."""
        addresses = list(dict.fromkeys(place.address for place in self.meeting.places))
        node = addresses.index(self.meeting.places[self.numbers.rank].address)
        return self.job.folder.path / f"train-node{node}.log" if node else self.job.folder.log

    def _command(self) -> list[str]:
        checkpoint = self.meeting.checkpoint
        return worker_command(self.job.plan, self.job.folder, Path(checkpoint) if checkpoint else None)

    def _variables(self, memory: SharedMemory) -> dict[str, str]:
        """The variables of a local run's process on this machine."""
        numbers, places = self.numbers, self.meeting.places
        first = numbers.rank - numbers.local
        here = places[first : first + numbers.local_world]
        gpus = tuple(place.gpus for place in here if place.gpus)
        batch = replace(self.job.plan.batch, processes=numbers.local_world)
        variables = process_variables(replace(self.job.plan, gpus=gpus, batch=batch))
        meet = Ranks(numbers.local_world, first, numbers.world, places[0].address, places[0].port)
        interface = interface_of(places[numbers.rank].address)
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface and numbers.world > 1 else ()
        return {
            **{name: str(interface) for name in names},
            **variables,
            **self.job.variables,
            **self.meeting.server,
            **rank_variables(meet, numbers.rank),
            NODES_VARIABLE: json.dumps(self.meeting.nodes()),
            ACTIVITY_VARIABLE: str(memory.path),
        }

    def _next_news(self, lines: Lines, memory: SharedMemory) -> RankNews:
        """Wait for the process's next lines, at most BEAT seconds."""
        heard: list[str] = []
        with suppress(queue.Empty):
            line = lines.get(timeout=BEAT)
            while line is not None:
                heard.append(line)
                line = lines.get_nowait()
            self.is_silent = True
        for event in map(decode, heard):
            self.has_reported |= isinstance(event, (Failed, Ended))
            self.pid = event.pid if isinstance(event, Started) else self.pid
        return RankNews(self.numbers.rank, tuple(heard), self._activity(memory))

    def _activity(self, memory: SharedMemory) -> Snapshot:
        """Phase and progress; in phases that move files, what was moved counts as progress."""
        seen = read(memory.memory, self.numbers.rank)
        if seen.part.moves_files and self.pid is not None:
            self._moved = max(self._moved, bytes_moved(self.pid) // BYTES)
        self.seen = replace(seen, count=seen.count + self._moved)
        return self.seen

    def _do(self, wanted: Requests, tree: ProcessTree, tell: Tell) -> None:
        before, self.requests = self.requests, wanted
        if wanted.stops > 1 or self.is_over:
            tree.kill()
        elif wanted.stops > before.stops:
            tree.send(signal.SIGTERM)
        if wanted.stacks > before.stacks:
            rank, waits = self.numbers.rank, False
            if self.pid is not None:
                with suppress(OSError):  # the log cannot be written: the run is ended without the stacks
                    waits = waits_for_another_rank(ask_for_stacks(self.log, rank, self.pid, self.seen))
            tell(RankNews(rank, waits=waits))


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None for a loopback address, or if there is none."""
    import psutil

    found = (name for name, parts in psutil.net_if_addrs().items() if any(part.address == address for part in parts))
    return None if address.startswith("127.") else next(found, None)


def _read_lines(tree: ProcessTree, lines: Lines) -> None:
    for line in tree.stdout:
        lines.put(line.decode(errors="replace"))
    lines.put(None)
