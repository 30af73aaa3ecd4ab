"""Plays the trials of a sweep: each is an `aitrain grpo` of its own, recorded in Optuna's journal."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from aitrain.errors import ConfigError, RunFailed
from aitrain.events import Announce, Evaluated, Failed, Note, RunResult, RunStarted, decode
from aitrain.launch.processes import PYTHON
from aitrain.launch.sweep_plan import SweepPlan
from aitrain.machine import usable_cores
from aitrain.options.sweep import SweepConfig
from aitrain.options.yaml_text import write_yaml
from aitrain.runs.heartbeat import sign_of_life
from aitrain.runs.run_folder import RunFolder, write_json, write_text
from aitrain.ui.sweep_page import best_trial, trial_name

COMMAND = (*PYTHON, "-m", "aitrain", "grpo")
STEP = "step "
PRUNED = "is_pruned"
"""Attribute of a trial that is being ended early."""
ENDED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
FAILURES = 3
"""The sweep ends when its first trials have failed, as the others would fail as well."""
HALVING = 2
"""Successive halving keeps one trial of this many."""


def pruner_of(config: SweepConfig) -> BasePruner:
    """Optuna's pruner of these options."""
    if config.pruner == "median":
        return MedianPruner(n_startup_trials=config.prune_after_trials, n_warmup_steps=config.prune_after_step)
    return SuccessiveHalvingPruner(reduction_factor=HALVING) if config.pruner == "halving" else NopPruner()


def device_shares(gpus: tuple[str, ...], parallel: int) -> list[dict[str, str]]:
    """Environment variables for each of the trials at the same time: equal shares of the GPUs, or of the cores.

    Raises:
        ConfigError: there are fewer GPUs than trials.
    """
    if parallel == 1:
        return [{}]
    if not gpus:
        return [{"OMP_NUM_THREADS": str(max(1, usable_cores() // parallel))}] * parallel
    share = len(gpus) // parallel
    if share == 0:
        raise ConfigError(f"--parallel {parallel}: there are only {len(gpus)} GPUs")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[n * share : (n + 1) * share])} for n in range(parallel)]


@dataclass
class Sweep:
    """The trials of a sweep, played one after another or several at a time.

    A trial that a stopped or killed sweep left is running in the record, and is resumed first.
    """

    plan: SweepPlan
    folder: Path
    study: Study
    on_begin: Callable[[FrozenTrial], Announce]
    """Called when a trial begins; returns where its events go."""
    on_end: Callable[[FrozenTrial], None]
    """Called when a trial ends or is stopped."""
    stops: int = 0
    _unfinished: list[FrozenTrial] = field(default_factory=list)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, shares: list[dict[str, str]]) -> None:
        """Play the trials that are left, as many at a time as there are `device_shares`.

        Raises:
            RunFailed: the first trials have failed.
        """
        self._unfinished = self.study.get_trials(states=(TrialState.RUNNING,))
        self._record("running")
        try:
            with ThreadPoolExecutor(len(shares), thread_name_prefix="trial") as pool:
                for worker in [pool.submit(self._play_trials, share) for share in shares]:
                    worker.result()
        except BaseException as error:
            self._record("failed", str(error))
            raise
        self._record("stopped" if self.stops else "finished")

    def stop(self) -> None:
        """Ask the running trials to finish their step and save; a second call kills them."""
        self.stops += 1
        for process in list(self._processes):
            process.terminate()

    def _record(self, status: str, reason: str = "") -> None:
        """Write status.json and result.json, by which other commands show the sweep."""
        folder, best, options = RunFolder(self.folder), best_trial(self.study), self.plan.config.options
        ended = self.study.get_trials(states=ENDED)
        steps = {"step": len(ended), "steps": self.plan.trials}
        folder.write_status(status, job="sweep", reason=reason, **steps, **sign_of_life())
        result = {
            "job": "sweep",
            "status": status,
            "seconds": sum(trial.user_attrs.get("seconds", 0.0) for trial in ended),
            "score_before": best and best.user_attrs["before"],
            "score_after": best and best.value,
            "base_model": options.get("model"),
            "environment": options.get("rl_env"),
        }
        write_json(folder.result, result)

    def _play_trials(self, share: dict[str, str]) -> None:
        """Play trials until none is left; an error stops the others as well."""
        try:
            while (trial := self._next()) is not None:
                announce = self.on_begin(trial)
                self._play(Trial(self.study, trial._trial_id), share, announce)
                self._end(trial.number)
        except BaseException:
            self.stop()
            raise

    def _next(self) -> FrozenTrial | None:
        with self._lock:
            trials = self.study.get_trials()
            if self.stops:
                return None
            if self._unfinished:
                return self._unfinished.pop(0)
            values = self.plan.next_values(trials) if len(trials) < self.plan.trials else None
            if values is None:
                return None
            made = create_trial(state=TrialState.RUNNING, params=values, distributions={**self.plan.space})
            self.study.add_trial(made)
            return self.study.get_trials()[-1]

    def _play(self, trial: Trial, share: dict[str, str], announce: Announce) -> None:
        """Play a trial and record its score, or why it has none; one that was stopped stays as it is."""
        result, error = ({}, "") if PRUNED in trial.user_attrs else self._train(trial, share, announce)
        is_greedy = self.plan.config.objective == "greedy"
        if (score := result.get("greedy_after" if is_greedy else "score_after")) is not None:
            row = result["scores"].get(self.plan.config.objective)
            known = {
                "before": result["greedy_before" if is_greedy else "score_before"],
                "interval": row and row["after"],
            }
            for name, value in {**known, "steps": result["steps"], "seconds": result["seconds"]}.items():
                trial.set_user_attr(name, value)
            self.study.tell(trial, score)
        elif PRUNED in trial.user_attrs:
            self.study.tell(trial, state=TrialState.PRUNED)
        elif not self.stops:
            trial.set_user_attr("error", error or "no score after the training: were there held-out cases?")
            self.study.tell(trial, state=TrialState.FAIL)

    def _train(self, trial: Trial, share: dict[str, str], announce: Announce) -> tuple[dict[str, Any], str]:
        """Run the training of a trial, or continue it; returns its result and its error, one of them empty."""
        name = trial_name(trial)
        file = self.folder / f"{name}.yaml"
        options = self.plan.trial_options(trial.params, project_name=name, output_dir=str(self.folder))
        write_text(file, write_yaml(options))
        resume = ["--resume"] if (self.folder / name).exists() else []
        command = [*COMMAND, "--config", str(file), "--json", *resume]
        result: dict[str, Any] = {}
        error = ""
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **share},
            start_new_session=True,  # Ctrl-C is for the sweep, which passes it on
        ) as process:
            self._processes.append(process)
            if self.stops:
                process.terminate()
            for line in process.stdout or ():
                event = decode(line)
                if isinstance(event, RunResult):
                    result = event.result
                elif isinstance(event, Failed):
                    error = event.message
                elif event is None:
                    error = line.strip() or error  # the last line of a traceback, if there is one
                elif not isinstance(event, RunStarted):
                    announce(event)
                if isinstance(event, Evaluated) and self._should_prune(trial, event):
                    announce(Note(f"{event.when}: the trial is pruned", "info"))
                    process.terminate()
        self._processes.remove(process)
        return result, error or (f"it ended with exit code {process.returncode}" if process.returncode else "")

    def _should_prune(self, trial: Trial, event: Evaluated) -> bool:
        """Report a held-out score during the training; returns whether the trial is to be ended now."""
        score = event.greedy if self.plan.config.objective == "greedy" else event.sampled
        if score is None or not event.when.startswith(STEP) or PRUNED in trial.user_attrs:
            return False
        step = int(event.when.removeprefix(STEP))
        if step not in self.study.get_trials()[trial.number].intermediate_values:  # else it was scored before a kill
            trial.report(score, step)
        if is_pruned := trial.should_prune():
            trial.set_user_attr(PRUNED, True)
        return is_pruned

    def _end(self, number: int) -> None:
        """Record and show the end of a trial; if the first ones have failed, end the sweep."""
        with self._lock:
            self._record("running")
            self.on_end(self.study.get_trials()[number])
        ended = self.study.get_trials(states=ENDED)
        if len(ended) == FAILURES and all(trial.state == TrialState.FAIL for trial in ended):
            why = ended[0].user_attrs["error"].splitlines()[0]
            raise RunFailed(
                f"The first {FAILURES} trials have failed: the sweep ends.\n{trial_name(ended[0])}: {why}\n"
                f"The details are in {self.folder}. Start the sweep again without --resume, which does not play failed"
                " trials again."
            )
