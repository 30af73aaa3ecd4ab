"""Plays one trial of a sweep: a run in its own folder, with the processes of `aitrain grpo`."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from aitrain.errors import ConfigError, Interrupted
from aitrain.events import Announce, Ended, Evaluated, Event, Failed, Note, Phase
from aitrain.launch.launcher import launcher_of
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.processes import Processes
from aitrain.launch.sweep_plan import SweepPlan
from aitrain.machine import usable_cores
from aitrain.runs.checkpoint import newest_checkpoint
from aitrain.runs.heartbeat import is_alive
from aitrain.runs.result import Result
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.runs.sweep_record import Trial, TrialStatus
from aitrain.ui.report_writer import ReportWriter

STEP = "step "
ORPHANS_EVERY = 0.5
"""Seconds between two looks at processes that a killed sweep left."""
IsPruned = Callable[[int, float], bool]
"""Takes a held-out score during the training with its step; returns whether the trial is to be ended."""


@dataclass
class TrialRuns:
    """Plays trials as runs. `stop` ends those that are running, from any thread."""

    plan: SweepPlan
    folder: Path
    """The sweep's folder."""
    screen: Callable[[Trial], Announce]
    """Where the events of a trial go."""
    gpus: list[tuple[str, ...]] = field(default_factory=list)
    """GPUs of each trial that runs at the same time; empty if they share what there is."""
    stops: int = 0
    _running: list[Processes] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def play(self, trial: Trial, is_pruned: IsPruned) -> TrialStatus:
        """Play a trial to its end, and note its result in it; returns how it ended.

        Raises:
            AitrainError: the trial cannot be started at all.
        """
        run, announce = RunFolder(self.folder / trial.name), self.screen(trial)
        self._wait_for_orphans(run, announce)
        if self.stops:
            return "stopped"
        if self._take_result(trial, run):  # the sweep was killed after the end of the run
            return "finished"
        with self._gpus() as gpus, ExitStack() as locks:
            config = self.plan.trial_config(trial, self.folder, **_resumed(run))
            with _visible(gpus, self._lock):
                run_plan = check(config, locks=locks)
            return self._run(trial, run_plan, locks.enter_context(run_plan.open_folder()), announce, is_pruned)

    def stop(self) -> None:
        """Ask the running trials to finish their step and save; a second call kills them."""
        self.stops += 1
        for processes in list(self._running):
            processes.stop()

    def _wait_for_orphans(self, run: RunFolder, announce: Announce) -> None:
        """Wait for the training processes of a sweep that was killed: they save and end after their step, or, if they
        hang, by their watchdog."""
        while is_alive(read_object(run.status)) and not self.stops:
            announce(Phase(f"waiting for the processes that a killed sweep left in {run.path.name}"))
            time.sleep(ORPHANS_EVERY)

    def _take_result(self, trial: Trial, run: RunFolder) -> bool:
        """Note the result of a run; False if it has no score after the training."""
        if not run.result.exists():
            return False
        result = Result.read(run.path)
        is_greedy = self.plan.config.objective == "greedy"
        trial.score = result.greedy_after if is_greedy else result.score_after
        trial.before = result.greedy_before if is_greedy else result.score_before
        row = result.scores.get(self.plan.config.objective)
        trial.interval = row["after"] if row else None
        trial.steps, trial.seconds = result.steps, result.seconds
        return trial.score is not None

    def _run(self, trial: Trial, plan: RunPlan, run: RunFolder, show: Announce, is_pruned: IsPruned) -> TrialStatus:
        report = ReportWriter(run)
        announce = report.during(show)
        is_greedy = self.plan.config.objective == "greedy"
        pruned = threading.Event()

        def hear(event: Event) -> None:
            announce(event)
            if isinstance(event, Evaluated) and event.when.startswith(STEP) and not pruned.is_set():
                score = event.greedy if is_greedy else event.sampled
                if score is not None and is_pruned(int(event.when.removeprefix(STEP)), score):
                    pruned.set()
                    announce(Note(f"{trial.name} is pruned: {event.when} has {score:.3f}"))
                    processes.stop()

        processes = launcher_of(plan)(plan, run, hear)
        self._running.append(processes)
        try:
            if self.stops:
                return "stopped"
            end = processes.run()
        finally:
            self._running.remove(processes)
        if isinstance(end, Failed):
            with suppress(OSError):  # the run may have failed with the same error
                run.write_status("stopped" if end.exit_code == Interrupted.exit_code else end.status)
        report.finish(announce)
        return self._ended(trial, run, end, pruned.is_set())

    def _ended(self, trial: Trial, run: RunFolder, end: Failed | Ended, was_pruned: bool) -> TrialStatus:
        has_score = isinstance(end, Ended) and self._take_result(trial, run)
        if has_score:
            return "finished"  # also a run that ended by itself before it could be stopped
        if was_pruned:
            return "pruned"
        if isinstance(end, Failed) and end.exit_code != Interrupted.exit_code:
            trial.error = end.message
            return "failed"
        if self.stops:
            return "stopped"
        trial.error = f"There is no score after the training: were there held-out cases? See {run.path}"
        return "failed"

    @contextmanager
    def _gpus(self) -> Iterator[tuple[str, ...]]:
        """GPUs that no other trial uses until the end of the block."""
        with self._lock:
            mine = self.gpus.pop() if self.gpus else ()
        try:
            yield mine
        finally:
            if mine:
                self.gpus.append(mine)


def _resumed(run: RunFolder) -> dict[str, object]:
    """The options that resume a run; one without a checkpoint is removed, and begins again."""
    if newest_checkpoint(run, lambda why: None):
        return {"resume_from_checkpoint": "auto"}
    if run.path.exists():
        shutil.rmtree(run.path)
    return {}


@contextmanager
def _visible(gpus: tuple[str, ...], lock: threading.Lock) -> Iterator[None]:
    """Make only these GPUs visible to the checks, which choose the GPUs of a run."""
    name = "CUDA_VISIBLE_DEVICES"
    if not gpus:
        yield
        return
    with lock:
        before = os.environ.get(name)
        os.environ[name] = ",".join(gpus)
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


def divide_gpus(gpus: tuple[str, ...], parallel: int) -> list[tuple[str, ...]]:
    """Equal shares of the GPUs for trials that run at the same time; without GPUs they share the cores.

    Raises:
        ConfigError: there are fewer GPUs than trials.
    """
    if parallel == 1:
        return []
    if not gpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // parallel)))
        return []
    share = len(gpus) // parallel
    if share == 0:
        raise ConfigError(f"--parallel {parallel}: there are only {len(gpus)} GPUs")
    return [gpus[first : first + share] for first in range(0, share * parallel, share)]
