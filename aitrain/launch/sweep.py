"""A sweep: its search space as Optuna's distributions, and its trials, each an `aitrain grpo` of its own, recorded in
Optuna's journal."""

import itertools
import json
import math
import os
import random
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from aitrain.errors import ConfigError
from aitrain.events import Announce, Failed, Note, RunResult, decode
from aitrain.launch.preflight import check
from aitrain.launch.processes import PYTHON
from aitrain.options.reading import resolve
from aitrain.options.section import options_of
from aitrain.options.sweep import SweepConfig
from aitrain.options.train import TrainConfig
from aitrain.options.yaml_text import write_yaml
from aitrain.runs.heartbeat import sign_of_life
from aitrain.runs.run_folder import RunFolder, write_json, write_text
from aitrain.ui.sweep_page import best_trial, outcome, trial_name, values_text, write_page

Distribution: TypeAlias = CategoricalDistribution | FloatDistribution | IntDistribution
FORMS = "Write a list of values, or a range like {low: 1e-6, high: 1e-4, log: true}."
USUAL_TRIALS = 10
RANDOM_TRIALS = 5
"""Trials with random values before the Parzen estimator begins."""

COMMAND = (*PYTHON, "-m", "aitrain", "grpo")


# -- what is searched


@dataclass(frozen=True)
class SweepPlan:
    """A sweep whose options are valid."""

    config: SweepConfig
    space: dict[str, Distribution]
    """The searched options."""
    notes: tuple[str, ...] = ()
    """Notes for the user before the first trial."""

    @property
    def trials(self) -> int:
        """Number of trials: at most the number of combinations."""
        lists = (isinstance(one, CategoricalDistribution) and len(one.choices) for one in self.space.values())
        size = math.prod(length or math.inf for length in lists)
        return int(min(self.config.trials or (size if self.config.sampler == "grid" else USUAL_TRIALS), size))

    @property
    def folder(self) -> Path:
        """Folder of the sweep, before a number is added to its name."""
        return Path(os.path.expanduser(self.config.output_dir)) / self.config.project_name

    def trial_options(self, values: Mapping[str, object], **own: object) -> dict[str, object]:
        """The options of a run with these values of the searched options."""
        options = {**self.config.options, **own}
        for name, value in values.items():
            given = self.config.search[name]
            if isinstance(given, list):
                value = next(choice for choice in given if _as_choice(choice) == value)
            options[name] = value
        return options

    def next_values(self, trials: list[FrozenTrial]) -> dict[str, Any] | None:
        """Values of the trial after these; None if there are enough.

        They depend on the seed and on these trials only, so a sweep that was killed continues as if it had not been.
        """
        if len(trials) >= self.trials:
            return None
        tried = [trial.params for trial in trials]
        untried = (values for values in self._combinations() if values not in tried)
        if self.config.sampler == "grid":
            return next(untried)
        seed = random.Random(f"{self.config.seed} {len(trials)}").getrandbits(31)
        sampler = TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials(trials)
        values = study.ask({**self.space}).params
        return next(untried, values) if values in tried else values

    def _combinations(self) -> Iterator[dict[str, Any]]:
        """All combinations of lists; none if there is a range."""
        lists = [one.choices for one in self.space.values() if isinstance(one, CategoricalDistribution)]
        if len(lists) == len(self.space):
            yield from (dict(zip(self.space, row, strict=True)) for row in itertools.product(*lists))


def check_sweep(config: SweepConfig) -> SweepPlan:
    """Check a run with each listed value and with both ends of each range.

    Raises:
        ConfigError: the sweep cannot work.
        EnvironmentFailed: the environment's file is not valid Python.
    """
    kinds = {option.name: option.type_name for option in options_of(TrainConfig)}
    space = {name: _distribution(name, given, kinds.get(name)) for name, given in config.search.items()}
    plan = SweepPlan(config, space)
    probes = {
        name: one.choices if isinstance(one, CategoricalDistribution) else (one.low, one.high)
        for name, one in space.items()
    }
    usual = {name: values[0] for name, values in probes.items()}
    notes: dict[str, None] = {}
    for name, values in probes.items():
        for value in values:
            options = plan.trial_options({**usual, name: value}, output_dir=config.output_dir)
            notes |= dict.fromkeys(check(resolve(TrainConfig, None, options)).notes)
    return SweepPlan(config, space, tuple(notes))


def _distribution(name: str, given: object, kind: str | None) -> Distribution:
    try:
        if isinstance(given, list):
            return CategoricalDistribution([_as_choice(value) for value in given])
        if not isinstance(given, dict):
            raise ValueError("a fixed value belongs under options")
        is_whole = kind != "number" and all(isinstance(given.get(key, 1), int) for key in ("low", "high", "step"))
        with warnings.catch_warnings(action="ignore"):  # of a `high` that no step leads to: the last step counts
            return IntDistribution(**given) if is_whole else FloatDistribution(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"search: {name}: {error}\n{FORMS}") from None


def _as_choice(value: Any) -> Any:
    """A listed value as Optuna takes it: a list or a table as JSON."""
    return json.dumps(value) if isinstance(value, (list, dict)) else value


# -- the trials


@dataclass
class Sweep:
    """The trials of a sweep, played one after another.

    A trial is recorded when it has ended. One that a stopped or killed sweep left is the next of the record again, with
    the same values, and its run is resumed.
    """

    plan: SweepPlan
    folder: Path
    study: Study
    announce: Announce
    stops: int = 0
    _process: subprocess.Popen[str] | None = None

    def run(self) -> None:
        """Play the trials that are left."""
        for note in self.plan.notes:
            self.announce(Note(note))
        self._record("running")
        try:
            while not self.stops and (values := self.plan.next_values(self.study.get_trials())) is not None:
                self._play(values)
                self._record("running")
        except BaseException as error:
            self._record("failed", str(error))
            raise
        self._record("stopped" if self.stops else "finished")

    def stop(self) -> None:
        """Ask the running trial to finish its step and save; a second call kills it."""
        self.stops += 1
        if self._process is not None:
            self._process.terminate()

    def _record(self, status: str, reason: str = "") -> None:
        """Write status.json and result.json, by which other commands show the sweep, and its page."""
        folder, best, options = RunFolder(self.folder), best_trial(self.study), self.plan.config.options
        ended = self.study.get_trials()
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
        write_page(self.study, self.folder)

    def _play(self, values: dict[str, Any]) -> None:
        """Run the training of the next trial, or continue it, and record its score, or why it has none; one that was
        stopped is not recorded yet."""
        number = len(self.study.get_trials())
        name, heading = trial_name(number), f"{trial_name(number)} ({number + 1} of {self.plan.trials})"
        self.announce(Note(f"{heading}: {values_text(values)}", "info"))
        file = self.folder / f"{name}.yaml"
        options = self.plan.trial_options(values, project_name=name, output_dir=str(self.folder))
        write_text(file, write_yaml(options))
        resume = ["--resume"] if (self.folder / name).exists() else []
        result: dict[str, Any] = {}
        error = ""
        with subprocess.Popen(
            [*COMMAND, "--config", str(file), "--json", *resume],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the sweep, which passes it on
        ) as self._process:
            if self.stops:
                self._process.terminate()
            for line in self._process.stdout or ():
                event = decode(line)
                if isinstance(event, RunResult):
                    result = event.result
                elif isinstance(event, Failed):
                    error = event.message
                elif event is None:
                    error = line.strip() or error  # the last line of a traceback, if there is one
                elif not isinstance(event, Note):  # all trials have the same at first; later ones are in their reports
                    self.announce(event)
        row = (result.get("scores") or {}).get(self.plan.config.objective)
        if row and row["after"]:
            facts = {"before": row["before"] and row["before"]["mean"], "interval": row["after"]}
            end = {"value": row["after"]["mean"], "user_attrs": {**facts, "seconds": result["seconds"]}}
        elif self.stops:
            return
        else:
            why = error or f"exit code {self._process.returncode} without a score: were there held-out cases?"
            end = {"state": TrialState.FAIL, "user_attrs": {"error": why}}
        self.study.add_trial(create_trial(params=values, distributions={**self.plan.space}, **end))
        best = best_trial(self.study)
        ahead = f"; best so far {best.value:.3f} ({trial_name(best.number)})" if best else ""
        self.announce(Note(f"{heading}: {outcome(self.study.get_trials()[number])}{ahead}", "info"))
