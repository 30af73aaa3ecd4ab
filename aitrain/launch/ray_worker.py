"""What runs inside of a worker of Ray Train: the parent of one training process.

Ray calls its function outside of the main thread, and ends it with its worker; so the training is a process of its own,
as in a local run. All that a rank says lies in a folder of its start in the run folder, which the command reads.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aitrain
from aitrain.errors import ConfigError, RunFailed
from aitrain.events import Event, Step, encode
from aitrain.launch.local_processes import Ranks
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import Processes
from aitrain.runs.checkpoint import newest_checkpoint
from aitrain.runs.node_info import NodeInfo
from aitrain.runs.run_folder import RunFolder, append_text, read_object, write_json

PRIVATE = ".ray"
"""Folder in the run folder for what the ranks say and Ray Train writes; deleted at the end."""
STOP, KILL = "stop", "kill"
"""Files in it by which the command asks the ranks to stop, or ends them."""
MEET_SECONDS = 60.0
"""Seconds in which the files of all ranks must appear; network file systems are late."""
LOOK = 0.5
"""Seconds between two looks for these files."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank of a start runs."""

    rank: int
    host: str
    address: str
    gpus: str = ""
    """As in CUDA_VISIBLE_DEVICES."""

    def __str__(self) -> str:
        return f"{self.host}, {self.address}" if self.host != self.address else self.host


@dataclass(frozen=True)
class RankJob:
    """What each rank of a run gets from the command."""

    plan: RunPlan
    folder: RunFolder
    working_directory: str
    server: dict[str, str] = field(default_factory=dict, repr=False)
    """Environment variables with address and key of the run's own vLLM servers."""
    variables: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""


def run_rank(config: dict[str, RankJob]) -> None:
    """The training function of Ray Train. It raises if the process was lost, so that Ray starts all ranks again; after
    an error of the run itself it returns, as that would happen again.

    Raises:
        RunFailed: the process ended without an error message.
        ConfigError: this machine does not share the folders of the run.
    """
    import ray.train
    import ray.util
    from ray.train.collective import broadcast_from_rank_zero

    os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the number of reserved CPUs
    job, context = config["job"], ray.train.get_context()
    rank, address = context.get_world_rank(), ray.util.get_node_ip_address()
    for folder in (job.working_directory, job.folder.path):
        if not os.path.isdir(folder):
            raise ConfigError(f"{socket.gethostname()} has no folder {folder}, which all machines must share")
    start = broadcast_from_rank_zero(_first_words(job, address) if rank == 0 else None)
    if start["version"] != aitrain.__version__:
        raise ConfigError(f"{socket.gethostname()} has aitrain {aitrain.__version__}, rank 0 {start['version']}")
    os.chdir(job.working_directory)
    os.environ.update(job.variables)
    said = job.folder.path / PRIVATE / start["name"]
    place = RankPlace(rank, socket.gethostname(), address, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    write_json(said / f"{rank}.json", {**asdict(place), "checkpoint": start["checkpoint"]})
    places = wait_for_places(said, context.get_world_size())
    first = rank - context.get_local_rank()
    ranks = Ranks(context.get_local_world_size(), first, context.get_world_size(), start["address"], start["port"])
    checkpoint = Path(start["checkpoint"]) if start["checkpoint"] else None
    processes = RankProcesses(
        job.plan, job.folder, partial(_say, said / f"{rank}.jsonl"), checkpoint=checkpoint, rank=rank, here=ranks,
        places=places, job=job,
    )  # fmt: skip
    end = processes.run()
    if processes.lost is not None and processes.last is None and not processes.stops:
        message = getattr(end, "message", "")
        write_json(said / f"{rank}.lost", {"message": message})
        raise RunFailed(message)


def _first_words(job: RankJob, address: str) -> dict[str, Any]:
    """What rank 0 decides for a start: its name, where the ranks meet, and the checkpoint."""
    private = job.folder.path / PRIVATE
    number = sum(path.is_dir() and path.name.startswith("start-") for path in private.iterdir())
    checkpoint = job.plan.checkpoint
    if any((private / f"start-{earlier:03d}" / "0.steps").exists() for earlier in range(number)):
        checkpoint = newest_checkpoint(job.folder, lambda _: None) or checkpoint
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    name = f"start-{number:03d}"
    (private / name).mkdir()
    return {
        "name": name,
        "version": aitrain.__version__,
        "address": address,
        "port": port,
        "checkpoint": str(checkpoint) if checkpoint else None,
    }


def wait_for_places(said: Path, world: int) -> list[RankPlace]:
    """The places of all ranks of a start.

    Raises:
        RunFailed: one is missing.
    """
    deadline = time.monotonic() + MEET_SECONDS
    while len(places := read_places(said)) < world:
        if time.monotonic() > deadline:
            raise RunFailed(f"{socket.gethostname()} does not see the files of all ranks in {said}")
        time.sleep(LOOK)
    return places


def read_places(said: Path) -> list[RankPlace]:
    """The places of the ranks of a start that are known, in the order of the ranks."""
    found = [read_object(file) for file in said.glob("*.json")]
    names = ("host", "address", "gpus")
    places = [RankPlace(int(str(each["rank"])), *(str(each[name]) for name in names)) for each in found if each]
    return sorted(places, key=lambda place: place.rank)


def nodes_of(places: list[RankPlace]) -> list[NodeInfo]:
    """The machines of a start, in the order of their first ranks."""
    addresses = list(dict.fromkeys(place.address for place in places))
    here = [[place for place in places if place.address == address] for address in addresses]
    return [
        NodeInfo(number, each[0].host, each[0].address, sum(bool(place.gpus) for place in each))
        for number, each in enumerate(here)
    ]


def _say(file: Path, event: Event) -> None:
    append_text(file, encode(event))
    if isinstance(event, Step):
        file.with_suffix(".steps").touch()


@dataclass
class RankProcesses(Processes):
    """The parent of one rank, whose machine may have others, each with a parent of its own."""

    rank: int = 0
    here: Ranks = field(default_factory=Ranks)
    """The ranks of this machine."""
    places: list[RankPlace] = field(default_factory=list)
    job: RankJob | None = None

    @property
    def node(self) -> int:
        """Number of this machine."""
        return [node.address for node in self.machines].index(self.places[self.rank].address)

    @property
    def machines(self) -> list[NodeInfo]:
        """All machines of the run."""
        return nodes_of(self.places)

    @property
    def system(self) -> Path:
        """Where the use of this machine is recorded, by the parent of its first rank."""
        return super().system if self.rank == self.here.first else self.folder.path / PRIVATE / f"{self.rank}-system"

    def _prepare(self, stack: ExitStack) -> None:
        assert self.job is not None
        self.ranks = replace(self.here, only=self.rank)
        here = [place for place in self.places if place.address == self.places[self.rank].address]
        gpus = tuple(place.gpus for place in here if place.gpus)
        batch = replace(self.plan.batch, processes=self.here.count)
        self.plan = replace(self.plan, gpus=gpus, batch=batch)
        self.server = self.job.server
        stack.enter_context(self._hearing())

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Do what the command asks for, in a thread."""
        over, private = threading.Event(), self.folder.path / PRIVATE

        def look() -> None:
            while not over.wait(LOOK):
                if (private / KILL).exists():
                    self.stops = 2
                    self._kill()
                elif (private / STOP).exists() and not self.stops:
                    self.stop()

        threading.Thread(target=look, name="ray", daemon=True).start()
        try:
            yield
        finally:
            over.set()
