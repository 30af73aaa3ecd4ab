"""The training of a run on a Ray cluster: Ray Train starts the ranks, and starts all again when one is lost.

The command reads what the ranks say from the run folder, which all machines share (`launch/ray_worker.py`).
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from aitrain.errors import AitrainError, RunFailed
from aitrain.events import Announce, Ended, Event, Failed, Note, Phase, decode, encode
from aitrain.execution.ray_connection import connected, has_gpus, machines
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import Processes, StartedProcesses
from aitrain.launch.ray_server import server_on_ray
from aitrain.launch.ray_worker import KILL, LOOK, PRIVATE, STOP, RankJob, RankPlace, nodes_of, read_places, run_rank
from aitrain.launch.stop_signals import on_stop_signals
from aitrain.redaction import RedactedLog
from aitrain.runs import node_info
from aitrain.runs.run_folder import RunFolder, read_object

STOP_SECONDS = 10.0
"""Seconds for the machines to end the ranks that were killed, or of which one was lost before."""


@dataclass
class RayProcesses(Processes):
    """The training processes of one run on a Ray cluster, in the process of the command."""

    def _prepare(self, stack: ExitStack) -> None:
        private = self.folder.path / PRIVATE
        shutil.rmtree(private, ignore_errors=True)
        private.mkdir()
        stack.callback(shutil.rmtree, private, ignore_errors=True)
        self.announce(Phase("connecting to Ray"))
        stack.enter_context(connected(self.plan.config.ray_address, may_start=True))
        stack.enter_context(on_stop_signals(self._on_signal))  # after Ray has set its own handlers
        self.announce(Phase(f"waiting for {self.plan.batch.processes} x {_in_words(training_needs())} of Ray"))
        self.server = stack.enter_context(server_on_ray(self.plan, self.folder, self.announce))
        self.ranks = replace(self.ranks, count=self.plan.batch.processes, world=self.plan.batch.processes)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The parent of each rank watches it."""
        yield

    def _start(self, log: RedactedLog) -> StartedProcesses:
        files = RankFiles(self.plan, replace(self.folder, path=self.folder.path.absolute(), lock=None), self.announce)
        files.start(self.server)
        return files


@dataclass
class RankFiles:
    """The ranks that Ray Train runs, by the files in which they say something."""

    plan: RunPlan
    folder: RunFolder
    announce: Announce
    starts: list[Path] = field(default_factory=list)
    """The folders of the starts so far, the last one is of the ranks that run."""
    failure: BaseException | None = None
    """Why Ray Train gave up."""
    failed: Failed | None = None
    """What the first rank of the last start that failed said; Ray may start all again."""
    has_ended: bool = False
    """Whether rank 0 said how the run ended."""
    stopped: float = float("inf")
    """When the ranks were asked to stop."""
    _fitting: threading.Thread | None = None
    _read: dict[Path, int] = field(default_factory=dict)
    """Bytes that were read of each file."""
    _lost: str = ""
    """What was lost last: a process or a machine."""
    _met: bool = False
    """Whether all ranks of the last start are there."""

    def start(self, server: dict[str, str]) -> None:
        """Start Ray Train in a thread, as it blocks until the run has ended."""
        self._fitting = threading.Thread(target=self._fit, args=[server], name="ray-train", daemon=True)
        self._fitting.start()

    def _fit(self, server: dict[str, str]) -> None:
        try:
            fit(self.plan, self.folder, server)
        except BaseException as error:
            self.failure = error

    def lines(self) -> Iterator[str]:
        """The events of all ranks, until Ray Train has ended. A failure is the last one: Ray may start all again."""
        assert self._fitting is not None
        while is_running := self._fitting.is_alive():
            yield from map(encode, self._news())
            if self._is_given_up():
                return
            time.sleep(LOOK)
        yield from map(encode, self._news())
        if not is_running and not self.has_ended and (failed := self._end()) is not None:
            yield encode(failed)

    def _news(self) -> Iterator[Event]:
        starts = sorted((self.folder.path / PRIVATE).glob("start-*"))
        if len(starts) > len(self.starts):
            self._lost = self._what_was_lost(self.starts[-1]) if self.starts else ""
            self.starts, self.failed, self._met = starts, None, False
        if not starts:
            return
        if not self._met and len(places := read_places(starts[-1])) == self.plan.batch.processes:
            self._met = True
            self.folder.write_status("running", nodes=node_info.as_json(nodes_of(places)))
            yield self._note_of_start(places)
        for file in sorted(starts[-1].glob("*.jsonl")):
            with file.open("rb") as opened:
                opened.seek(self._read.get(file, 0))
                text = opened.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[file] = self._read.get(file, 0) + len(whole)
            events = [decode(line) for line in whole.decode(errors="replace").splitlines()]
            for event in (event for event in events if event is not None):
                self.has_ended |= isinstance(event, Ended)
                if isinstance(event, Failed):
                    self.failed = self.failed or event
                else:
                    yield event

    def _what_was_lost(self, start: Path) -> str:
        """The process or machine whose loss has ended a start."""
        said = [str(read_object(file).get("message")) for file in sorted(start.glob("*.lost"))]
        alive = {machine.address for machine in machines()}
        gone = [place for place in read_places(start) if place.address not in alive]
        if gone:
            ranks = " and ".join(str(place.rank) for place in gone if place.address == gone[0].address)
            return f"Machine {gone[0].host} ({gone[0].address}) is gone, with rank {ranks}"
        return said[0].partition("\n")[0] if said else "A rank was lost"

    def _note_of_start(self, places: list[RankPlace]) -> Note:
        where = "; ".join(f"rank {place.rank} on {place}" for place in places)
        if len(self.starts) == 1:
            return Note(f"Training on Ray: {where}.", "info")
        checkpoint = str(read_object(self.starts[-1] / "0.json").get("checkpoint") or "the beginning")
        restart = f"restart {len(self.starts) - 1} of {self.plan.config.max_failures}"
        return Note(f"{self._lost}. All ranks continue from {Path(checkpoint).name} ({restart}): {where}.")

    def _end(self) -> Failed | None:
        """Why the run failed: of Ray Train, unless an error of the run itself ended it."""
        is_cause = self.failed is None or self.failed.exit_code == RunFailed.exit_code
        if self.failure is None or not is_cause:
            return self.failed
        restarts = len(self.starts) - 1
        given_up = f"\nIt was started again {restarts} times (--max-failures)." if restarts > 0 else ""
        lost = (
            self._what_was_lost(self.starts[-1]) if self.starts and not isinstance(self.failure, AitrainError) else ""
        )
        why = cause_of(self.failure) if lost in ("", "A rank was lost") else lost
        return Failed(f"{why}.{given_up}\nSee {self.folder.log}", RunFailed.exit_code)

    def _is_given_up(self) -> bool:
        """Whether Ray Train waits for machines although the run is to stop, or a machine does not end its ranks."""
        is_waiting = not self._met or self.failed is not None or (self.folder.path / PRIVATE / KILL).exists()
        return is_waiting and time.monotonic() - self.stopped > STOP_SECONDS

    def send(self, number: signal.Signals) -> None:
        """Ask the ranks to finish their step, save and leave."""
        self._ask(STOP)

    def kill(self) -> None:
        """SIGKILL to each of them, and to all that they have started."""
        self._ask(KILL)

    def _ask(self, what: str) -> None:
        self.stopped = min(self.stopped, time.monotonic())
        with suppress(OSError):  # Ray Train has ended
            (self.folder.path / PRIVATE / what).touch()

    def wait(self, seconds: float) -> None:
        """Ray ends what is left when the command disconnects."""


def training_needs() -> dict[str, float]:
    """What one training process reserves: a GPU, if the cluster has one."""
    return {"CPU": 1.0, "GPU": 1.0} if has_gpus() else {"CPU": 1.0}


def _in_words(needs: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {name}" for name, count in needs.items())


def fit(plan: RunPlan, folder: RunFolder, server: dict[str, str]) -> None:
    """Run Ray Train until the run has ended.

    Raises:
        Exception: a rank was lost more often than it may be, or Ray failed; see cause_of.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    variables = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}  # for environments on Ray
    variables |= {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    job = RankJob(replace(plan, sources={}), replace(folder, made=()), os.getcwd(), server, variables)
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
            failure_config=FailureConfig(max_failures=plan.config.max_failures),
        ),
    ).fit()


def cause_of(error: BaseException | None) -> str:
    """The first cause of an error of Ray Train, in one sentence without its traceback."""
    failures = getattr(error, "worker_failures", None) or {}
    rank, cause = next(iter(failures.items()), (None, error))
    cause = getattr(cause, "controller_failure", cause)
    # fields of the actor are indented, such as `class_name: RayTrainWorker`
    lines = [line for line in str(cause).splitlines() if line.strip() and not line.startswith("\t")]
    if any(line.startswith("Traceback") for line in lines):
        lines = lines[-1:]
    text = " ".join(line.strip() for line in lines)[:300].rstrip(".") or type(cause).__name__
    return text if rank is None else f"Rank {rank} was lost: {text}"
