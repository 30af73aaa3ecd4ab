"""The training of a run on a Ray cluster: Ray Train starts the ranks, and starts all again when one is lost.

Ray calls its functions outside of the main thread of a worker, and ends them with it; so there each rank is a process
of its own with a parent, as in a local run. All that a rank says lies in a folder of its start in the run folder, which
all machines share, and where the command reads it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aitrain
from aitrain.errors import ConfigError, RunFailed
from aitrain.events import Announce, Ended, Event, Failed, Note, Phase, Step, decode, encode
from aitrain.execution.process_tree import on_stop_signals
from aitrain.execution.ray_connection import connected, has_gpus
from aitrain.launch.machines import LaunchedRank
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import Processes
from aitrain.redaction import disable_telemetry
from aitrain.runs.checkpoint import newest_checkpoint
from aitrain.runs.heartbeat import NodeInfo
from aitrain.runs.json_values import whole_lines
from aitrain.runs.run_folder import RunFolder, append_text, read_object, write_json

PRIVATE = ".ray"
"""Folder in the run folder for what the ranks say and Ray Train writes; deleted at the end."""
STOP, KILL = "stop", "kill"
"""Files in it by which the command asks the ranks to stop, or ends them."""
MEET_SECONDS = 60.0
"""Seconds in which the files of all ranks must appear; network file systems are late."""
LOOK = 0.5
"""Seconds between two looks for these files."""
RESTARTS = 3
"""How often Ray restarts the training from its newest checkpoint after a process or a machine is lost."""
STOP_SECONDS = 10.0
"""Seconds for the machines to end the ranks that were killed, or of which one was lost before."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank of a start runs."""

    rank: int
    host: str
    address: str
    gpus: str = ""
    """As in CUDA_VISIBLE_DEVICES."""
    checkpoint: str | None = None
    """From which all ranks continue."""


@dataclass(frozen=True)
class RankJob:
    """What each rank of a run gets from the command."""

    plan: RunPlan
    folder: RunFolder
    working_directory: str
    variables: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""


# -- in the command


@dataclass
class RayProcesses(Processes):
    """The training processes of one run on a Ray cluster, in the process of the command."""

    starts: list[Path] = field(default_factory=list)
    """The folders of the starts so far, the last one is of the ranks that run."""
    failure: BaseException | None = None
    """Why Ray Train gave up."""
    failed: Failed | None = None
    """What the first rank of the last start that failed said; Ray may start all again."""
    stopped: float = float("inf")
    """When the ranks were asked to stop."""
    _read: dict[Path, int] = field(default_factory=dict)
    """Bytes that were read of each file."""
    _met: bool = False
    """Whether all ranks of the last start are there."""

    def run(self) -> Failed | Ended:
        """Run Ray Train, announce the events of the ranks, and wait for its end.

        A failure is the last event, because Ray may start all again.
        """
        disable_telemetry()
        self.folder = replace(self.folder, path=self.folder.path.absolute(), lock=None)
        with ExitStack() as stack:
            stack.enter_context(on_stop_signals(self._on_signal))
            shutil.rmtree(self.private, ignore_errors=True)
            self.private.mkdir()
            stack.callback(shutil.rmtree, self.private, ignore_errors=True)
            self.announce(Phase("connecting to Ray"))
            stack.enter_context(connected(self.plan.config.ray_address, may_start=True))
            stack.enter_context(on_stop_signals(self._on_signal))  # after Ray has set its own handlers
            needs = " and ".join(f"{count:g} {name}" for name, count in training_needs().items())
            self.announce(Phase(f"waiting for {self.world} x {needs} of Ray"))
            fitting = threading.Thread(target=self._fit, name="ray-train", daemon=True)
            self.is_started = True
            fitting.start()
            while (is_running := fitting.is_alive()) and not self._is_given_up():
                self._hear_ranks()
                time.sleep(LOOK)
            self._hear_ranks()
            if not is_running and self.last is None and (failed := self._why_failed()) is not None:
                self._hear(failed)
            return self._end()

    @property
    def private(self) -> Path:
        """The folder of what the ranks say."""
        return self.folder.path / PRIVATE

    def _fit(self) -> None:
        """Run Ray Train until the run has ended."""
        try:
            fit(self.plan, self.folder)
        except BaseException as error:
            self.failure = error

    def _hear_ranks(self) -> None:
        """Announce what the ranks have said since the last time."""
        starts = sorted(self.private.glob("start-*"))
        if len(starts) > len(self.starts):
            self.starts, self.failed, self._met = starts, None, False
        if not starts:
            return
        if not self._met and len(places := read_places(starts[-1])) == self.world:
            self._met = True
            where = "; ".join(f"rank {place.rank} on {place.host}, {place.address}" for place in places)
            if len(starts) == 1:
                self._hear(Note(f"Training on Ray: {where}.", "info"))
            else:
                checkpoint = Path(places[0].checkpoint or "the beginning").name
                restart = f"restart {len(starts) - 1} of {RESTARTS}"
                self._hear(Note(f"A rank was lost. All ranks continue from {checkpoint} ({restart}): {where}."))
        for file in sorted(starts[-1].glob("*.jsonl")):
            with file.open("rb") as opened:
                opened.seek(self._read.get(file, 0))
                for line, _, end in whole_lines(opened):
                    event, self._read[file] = decode(line.decode(errors="replace")), end
                    if isinstance(event, Failed):
                        self.failed = self.failed or event
                    elif event is not None:
                        self._hear(event)

    def _why_failed(self) -> Failed | None:
        """Why the run failed: of Ray Train, unless an error of the run itself ended it."""
        is_cause = self.failed is None or self.failed.exit_code == RunFailed.exit_code
        if self.failure is None or not is_cause:
            return self.failed
        restarts = len(self.starts) - 1
        given_up = f"\nIt was started again {restarts} times." if restarts > 0 else ""
        return Failed(f"{cause_of(self.failure)}.{given_up}\nSee {self.folder.log}", RunFailed.exit_code)

    def _is_given_up(self) -> bool:
        """Whether Ray Train waits for machines although the run is to stop, or a machine does not end its ranks."""
        is_waiting = not self._met or self.failed is not None or (self.private / KILL).exists()
        return is_waiting and time.monotonic() - self.stopped > STOP_SECONDS

    def _send(self, number: signal.Signals) -> None:
        """Ask the ranks to finish their step, save and leave, or end them."""
        self.stopped = min(self.stopped, time.monotonic())
        with suppress(OSError):  # Ray Train has ended
            (self.private / (KILL if number == signal.SIGKILL else STOP)).touch()


def launcher_of(plan: RunPlan) -> type[Processes]:
    """The class that runs a plan: that of `--launcher`.

    Raises:
        ConfigError: the plan is for several machines, and this command runs on one.
    """
    if plan.nodes is not None:
        raise ConfigError("nnodes: only aitrain grpo runs on several machines\nOmit --nnodes here.")
    if plan.config.launcher == "ray":
        return RayProcesses
    return Processes


def training_needs() -> dict[str, float]:
    """What one training process reserves: a GPU, if the cluster has one."""
    return {"CPU": 1.0, "GPU": 1.0} if has_gpus() else {"CPU": 1.0}


def fit(plan: RunPlan, folder: RunFolder) -> None:
    """Run Ray Train until the run has ended.

    Raises:
        Exception: a rank was lost more often than it may be, or Ray failed; see cause_of.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    variables = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}  # for environments on Ray
    variables |= {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    job = RankJob(replace(plan, sources={}), replace(folder, is_new=False), os.getcwd(), variables)
    needs = training_needs()
    DataParallelTrainer(
        run_rank,
        train_loop_config={"job": job},
        scaling_config=ScalingConfig(
            num_workers=plan.batch.processes, use_gpu="GPU" in needs, resources_per_worker=needs
        ),
        run_config=RunConfig(
            name="train",
            storage_path=str(folder.path / PRIVATE),
            failure_config=FailureConfig(max_failures=RESTARTS),
        ),
    ).fit()


def cause_of(error: BaseException | None) -> str:
    """The first cause of an error of Ray Train, the last line of its text."""
    failures = getattr(error, "worker_failures", None) or {}
    rank, cause = next(iter(failures.items()), (None, error))
    cause = getattr(cause, "controller_failure", cause)
    text = str(cause).strip().rpartition("\n")[2].strip()[:300].rstrip(".") or type(cause).__name__
    return text if rank is None else f"Rank {rank} was lost: {text}"


# -- in a worker of Ray Train


def run_rank(config: dict[str, RankJob]) -> None:
    """The training function of Ray Train: the parent of one rank, whose machine may have others with parents of their
    own. It raises if the process was lost, so that Ray starts all ranks again; after an error of the run itself it
    returns, as that would happen again.

    Raises:
        RunFailed: the process ended without an error message.
        ConfigError: this machine does not share the folders of the run.
    """
    import ray.train
    import ray.util
    from ray.train.collective import broadcast_from_rank_zero

    os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to the number of reserved CPUs
    job, context = config["job"], ray.train.get_context()
    number, address = context.get_world_rank(), ray.util.get_node_ip_address()
    start = broadcast_from_rank_zero(first_words(job, address) if number == 0 else None)
    if start["version"] != aitrain.__version__:
        raise ConfigError(f"{socket.gethostname()} has aitrain {aitrain.__version__}, rank 0 {start['version']}")
    os.chdir(job.working_directory)
    os.environ.update(job.variables)
    said = job.folder.path / PRIVATE / start["name"]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    place = RankPlace(number, socket.gethostname(), address, gpus, start["checkpoint"])
    write_json(said / f"{number}.json", asdict(place))
    deadline, world = time.monotonic() + MEET_SECONDS, context.get_world_size()
    while len(places := read_places(said)) < world:
        if time.monotonic() > deadline:
            raise RunFailed(f"{socket.gethostname()} does not see the files of all ranks in {said}")
        time.sleep(LOOK)
    if number == 0:  # before its process, which rewrites the file from then on, is started
        job.folder.write_status("running", nodes=list(map(asdict, nodes_of(places))))
    local = context.get_local_rank(), context.get_local_world_size()
    processes = parent_of(
        LaunchedRank(number, world, *local, start["address"], start["port"]), places, job, partial(say, said, number)
    )
    with listening(processes):
        end = processes.run()
    if processes.lost is not None and processes.last is None and not processes.stops:
        lost = getattr(end, "message", "")
        say(said, number, Note(lost))
        raise RunFailed(lost)


def first_words(job: RankJob, address: str) -> dict[str, Any]:
    """What rank 0 decides for a start: its name, where the ranks meet, and the checkpoint."""
    private = job.folder.path / PRIVATE
    number, checkpoint = len(list(private.glob("start-*"))), job.plan.checkpoint
    if any(private.glob("start-*/0.steps")):
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


def read_places(said: Path) -> list[RankPlace]:
    """The places of the ranks of a start that are known, in the order of the ranks."""
    places = [RankPlace(**found) for found in map(read_object, said.glob("*.json")) if found]
    return sorted(places, key=lambda place: place.rank)


def nodes_of(places: list[RankPlace]) -> list[NodeInfo]:
    """The machines of a start, in the order of their first ranks."""
    addresses = list(dict.fromkeys(place.address for place in places))
    here = [[place for place in places if place.address == address] for address in addresses]
    return [
        NodeInfo(number, each[0].host, each[0].address, sum(bool(place.gpus) for place in each), len(each))
        for number, each in enumerate(here)
    ]


def say(said: Path, rank: int, event: Event) -> None:
    """Write an event to the file of its rank."""
    append_text(said / f"{rank}.jsonl", encode(event))
    if isinstance(event, Step):
        (said / f"{rank}.steps").touch()


def parent_of(rank: LaunchedRank, places: list[RankPlace], job: RankJob, announce: Announce) -> Processes:
    """The parent of one rank, which gets the GPUs and the cores of its machine that all ranks there have."""
    own = places[rank.rank]
    here = [place for place in places if place.address == own.address]
    plan = replace(
        job.plan,
        checkpoint=Path(own.checkpoint) if own.checkpoint else None,
        gpus=tuple(place.gpus for place in here if place.gpus),
        batch=replace(job.plan.batch, processes=len(here)),
    )
    nodes = nodes_of(places)
    node = [each.address for each in nodes].index(own.address)
    return Processes(plan, job.folder, announce, ranks=[rank], node=node, machines=nodes)


@contextmanager
def listening(processes: Processes) -> Iterator[None]:
    """Do what the command asks for, in a thread."""
    over, private = threading.Event(), processes.folder.path / PRIVATE

    def look() -> None:
        while not over.wait(LOOK):
            for times, name in enumerate((STOP, KILL), 1):
                if (private / name).exists():
                    processes.stop(times)

    threading.Thread(target=look, name="ray", daemon=True).start()
    try:
        yield
    finally:
        over.set()
