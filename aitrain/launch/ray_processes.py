"""The training of a run on a Ray cluster: Ray Train starts the ranks, and starts all again when one is lost.

Ray calls its functions outside of the main thread of a worker, and ends them with it; so there each rank is a process
of its own with a parent, as in a local run. All that a rank says lies in a folder of its start in the run folder, which
all machines share, and where the command reads it.
"""

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import aitrain
from aitrain.errors import ConfigError, RunFailed
from aitrain.events import Ended, Event, Failed, Note, Phase, Step, decode, encode
from aitrain.execution.process_tree import on_stop_signals
from aitrain.execution.ray_connection import connected, has_gpus
from aitrain.launch.machines import LaunchedRank
from aitrain.launch.nodes import interface_variables
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import Processes
from aitrain.redaction import disable_telemetry
from aitrain.runs.checkpoint import newest_checkpoint
from aitrain.runs.json_values import whole_lines
from aitrain.runs.run_folder import RunFolder, append_text

PRIVATE = ".ray"
"""Folder in the run folder for what the ranks say and Ray Train writes; deleted at the end."""
STOP, KILL = "stop", "kill"
"""Files in it by which the command asks the ranks to stop, or ends them."""
SEES_WITHIN = 60.0
"""Seconds in which all machines must see the folder of a start; network file systems are late."""
LOOK = 0.5
"""Seconds between two looks for these files."""
RESTARTS = 3
"""How often Ray restarts the training from its newest checkpoint after a process or a machine is lost."""
STOP_SECONDS = 10.0
"""Seconds for the machines to end the ranks that were killed, or of which one was lost before."""


# -- in the command


@dataclass
class RayProcesses(Processes):
    """The training processes of one run on a Ray cluster, in the process of the command."""

    starts: int = 0
    """Number of starts so far; the ranks of the last one run."""
    failure: BaseException | None = None
    """Why Ray Train gave up."""
    failed: Failed | None = None
    """What the first rank of the last start that failed said; Ray may start all again."""
    stopped: float = float("inf")
    """When the ranks were asked to stop."""
    _read: dict[Path, int] = field(default_factory=dict)
    """Bytes that were read of each file."""

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
            stack.enter_context(connected(self.plan.config.ray_address))
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
        if (starts := len(list(self.private.glob("start-*")))) > self.starts:
            self.starts, self.failed = starts, None
        for file in sorted(self.private.glob(f"start-{starts}/*.jsonl")):
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
        why = str(self.failure).strip().rpartition("\n")[2][:300]
        return Failed(f"Ray Train gave up: {why}\nSee {self.folder.log}", RunFailed.exit_code)

    def _is_given_up(self) -> bool:
        """Whether Ray Train waits for machines although the run is to stop, or a machine does not end its ranks."""
        is_waiting = not self.starts or self.failed is not None or (self.private / KILL).exists()
        return is_waiting and time.monotonic() - self.stopped > STOP_SECONDS

    def _send(self, number: signal.Signals) -> None:
        """Ask the ranks to finish their step, save and leave, or end them."""
        self.stopped = min(self.stopped, time.monotonic())
        with suppress(OSError):  # Ray Train has ended
            (self.private / (KILL if number == signal.SIGKILL else STOP)).touch()


def training_needs() -> dict[str, float]:
    """What one training process reserves: a GPU, if the cluster has one."""
    return {"CPU": 1.0, "GPU": 1.0} if has_gpus() else {"CPU": 1.0}


def fit(plan: RunPlan, folder: RunFolder) -> None:
    """Run Ray Train until the run has ended.

    Raises:
        Exception: a rank was lost more often than it may be, or Ray failed.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    variables = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}  # for environments on Ray
    variables |= {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    job = {
        "plan": replace(plan, sources={}),
        "folder": replace(folder, is_new=False),
        "working_directory": os.getcwd(),
        "variables": variables,
    }
    needs = training_needs()

    # each rank sees all GPUs that the run has on its machine, so that NCCL connects them
    class SharedGpus(Backend):  # type: ignore[misc]
        share_cuda_visible_devices = True

    class OnSharedGpus(BackendConfig):  # type: ignore[misc]
        backend_cls = SharedGpus

    DataParallelTrainer(
        run_rank,
        train_loop_config=job,
        backend_config=OnSharedGpus(),
        scaling_config=ScalingConfig(
            num_workers=plan.batch.processes, use_gpu="GPU" in needs, resources_per_worker=needs
        ),
        run_config=RunConfig(
            name="train",
            storage_path=str(folder.path / PRIVATE),
            failure_config=FailureConfig(max_failures=RESTARTS),
        ),
    ).fit()


# -- in a worker of Ray Train


def run_rank(job: dict[str, Any]) -> None:
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
    plan, folder, context = job["plan"], job["folder"], ray.train.get_context()
    number, address, host = context.get_world_rank(), ray.util.get_node_ip_address(), socket.gethostname()
    start = broadcast_from_rank_zero(first_words(plan, folder, address) if number == 0 else None)
    if start["version"] != aitrain.__version__:
        raise ConfigError(f"{host} has aitrain {aitrain.__version__}, rank 0 {start['version']}")
    os.chdir(job["working_directory"])
    os.environ.update({**interface_variables(address), **os.environ, **job["variables"]})
    said, deadline = folder.path / PRIVATE / start["name"], time.monotonic() + SEES_WITHIN
    while not said.is_dir():
        if time.monotonic() > deadline:
            raise ConfigError(f"output_dir: {host} does not see {said} of rank 0")
        time.sleep(LOOK)
    local_rank, here, world = context.get_local_rank(), context.get_local_world_size(), context.get_world_size()
    if local_rank == 0:
        say(said, number, Note(f"Training on {host}, {address}: {here} of {world} ranks.", "info"))
    gpus = filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    of_machine = replace(plan.batch, processes=here)  # which have its cores
    plan = replace(plan, checkpoint=start["checkpoint"], gpus=tuple(gpus), batch=of_machine)
    rank = LaunchedRank(number, world, local_rank, here, start["address"], start["port"])
    processes = Processes(plan, folder, partial(say, said, number), ranks=[rank], node=context.get_node_rank())
    with listening(processes):
        processes.run()
    if processes.lost is not None and processes.last is None and not processes.stops:
        say(said, number, Note(processes.lost.message))
        raise RunFailed(processes.lost.message)


def first_words(plan: RunPlan, folder: RunFolder, address: str) -> dict[str, Any]:
    """What rank 0 decides for a start: its name, where the ranks meet, and the checkpoint."""
    private, checkpoint = folder.path / PRIVATE, plan.checkpoint
    number = len(list(private.glob("start-*"))) + 1
    if any(private.glob("start-*/0.steps")):
        checkpoint = newest_checkpoint(folder, lambda _: None) or checkpoint
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    name = f"start-{number}"
    (private / name).mkdir()
    if number > 1:
        place = "the beginning" if checkpoint is None else checkpoint.name
        restart = f"restart {number - 1} of {RESTARTS}"
        say(private / name, 0, Note(f"A rank was lost. All ranks continue from {place} ({restart})."))
    return {"name": name, "version": aitrain.__version__, "address": address, "port": port, "checkpoint": checkpoint}


def say(said: Path, rank: int, event: Event) -> None:
    """Write an event to the file of its rank."""
    append_text(said / f"{rank}.jsonl", encode(event))
    if isinstance(event, Step):
        (said / f"{rank}.steps").touch()


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
