"""Plays the trials of a sweep, and records them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from aitrain.errors import ConfigError, RunFailed
from aitrain.launch.sweep_plan import SweepPlan
from aitrain.launch.sweep_study import propose, should_prune
from aitrain.runs.sweep_record import SweepRecord, Trial, TrialStatus

PlayTrial = Callable[[Trial, Callable[[int, float], bool]], TrialStatus]
"""Plays a trial and notes its result in it. It reports held-out scores during the training, with their step, to the
second argument, which returns whether to end the trial."""
FAILURES = 3
"""The sweep ends when its first trials have failed, as the others would fail as well."""


@dataclass
class Sweep:
    """The trials of a sweep, played one after another or several at a time. Each change is recorded at once."""

    plan: SweepPlan
    record: SweepRecord
    play: PlayTrial
    on_change: Callable[[Trial], None] = lambda trial: None
    """Called when a trial begins or ends."""
    is_stopping: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: list[Trial] = field(default_factory=list)
    """Trials that a killed or stopped sweep left unfinished."""

    def run(self, parallel: int = 1) -> None:
        """Play the trials that are left.

        Raises:
            AitrainError: a trial could not be started, or the first ones have failed.
        """
        self._waiting = [trial for trial in self.record.trials if not trial.has_ended]
        self.record.status, status = "running", "failed"
        self.record.write()
        try:
            with ThreadPoolExecutor(parallel, thread_name_prefix="trial") as pool:
                workers = [pool.submit(self._play_trials) for _ in range(parallel)]
            for worker in workers:
                worker.result()
            is_complete = all(trial.has_ended for trial in self.record.trials) and not self.is_stopping
            status = "finished" if is_complete else "stopped"
        finally:
            self.record.status = status
            self.record.write()

    def _play_trials(self) -> None:
        """Play trials until none is left; an error stops the others as well."""
        try:
            while (trial := self._next()) is not None:
                self.on_change(trial)
                self._end(trial, self._play(trial))
                self.on_change(trial)
        except BaseException:
            self.is_stopping = True
            raise

    def _play(self, trial: Trial) -> TrialStatus:
        plan = self.plan
        if trial.scores and should_prune(plan.config, plan.space, trial, self.record.trials):
            return "pruned"  # as decided before the sweep was killed
        try:
            return self.play(trial, partial(self._is_pruned, trial))
        except ConfigError as error:  # values that do not go together, which only a trial inside of a range may have
            trial.error = str(error)
            return "failed"

    def _next(self) -> Trial | None:
        with self._lock:
            trials = self.record.trials
            if self.is_stopping:
                return None
            if self._waiting:
                trial = self._waiting.pop(0)
                trial.status = "running"
            elif len(trials) < self.record.planned:
                values = propose(self.plan.config, self.plan.space, trials)
                if values is None:
                    return None
                trial = Trial(len(trials), values)
                trials.append(trial)
            else:
                return None
            self.record.write(durable=False)
            return trial

    def _is_pruned(self, trial: Trial, step: int, score: float) -> bool:
        with self._lock:
            trial.scores[step] = score
            pruned = should_prune(self.plan.config, self.plan.space, trial, self.record.trials)
            self.record.write(durable=False)
            return pruned

    def _end(self, trial: Trial, status: TrialStatus) -> None:
        with self._lock:
            trial.status = status
            self.record.write()
            ended = [one for one in self.record.trials if one.has_ended]
            if len(ended) == FAILURES and all(one.status == "failed" for one in ended):
                first, (why, *_) = ended[0].name, (ended[0].error or "no reason").splitlines()
                raise RunFailed(
                    f"The first {FAILURES} trials have failed: the sweep ends.\n{first}: {why}\n"
                    f"The details are in {self.record.folder / first}. Once the cause is removed, start the sweep again"
                    " without --resume, which does not play failed trials again."
                )
