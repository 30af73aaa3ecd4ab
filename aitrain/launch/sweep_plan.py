"""A checked sweep: its search space as Optuna's distributions, and the options of its trials."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial

from aitrain.errors import ConfigError
from aitrain.launch.preflight import check
from aitrain.options.option import options_of
from aitrain.options.other_names import unknown_option
from aitrain.options.reading import resolve
from aitrain.options.sweep import TRL, SweepConfig
from aitrain.options.train import TrainConfig
from aitrain.runs.json_values import as_object

Distribution: TypeAlias = CategoricalDistribution | FloatDistribution | IntDistribution
FORMS = "Write a list of values, or a range like {low: 1e-6, high: 1e-4, log: true}."
USUAL_TRIALS = 10
RANDOM_TRIALS = 5
"""Trials with random values before the Parzen estimator begins."""
MOST_COMBINATIONS = 10_000
"""Finite spaces up to this size are searched without trying a combination twice; a grid is not larger."""

RESHAPING = ("rl_temperature", "rl_top_k", "rl_top_p", "rl_min_p", "rl_repetition_penalty")
"""Options that change how held-out completions are sampled."""


@dataclass(frozen=True)
class SweepPlan:
    """A sweep whose options are valid."""

    config: SweepConfig
    space: dict[str, Distribution]
    """The searched options; `trl.KEY` is a field of TRL."""
    notes: tuple[str, ...] = ()
    """Notes for the user before the first trial."""

    @property
    def size(self) -> float:
        """Number of combinations; infinity if a range has no steps."""
        return math.prod(len(_values(distribution)) or math.inf for distribution in self.space.values())

    @property
    def trials(self) -> int:
        """Number of trials: at most the number of combinations."""
        wanted = self.config.trials or (self.size if self.config.sampler == "grid" else USUAL_TRIALS)
        return int(min(wanted, self.size))

    @property
    def folder(self) -> Path:
        """Folder of the sweep, before a number is added to its name."""
        return Path(os.path.expanduser(self.config.output_dir)) / self.config.project_name

    def trial_options(self, values: Mapping[str, object], **own: object) -> dict[str, object]:
        """The options of a run with these values of the searched options."""
        options = {**self.config.options, **own}
        fields = dict(as_object(options.get("trl")))
        for name, value in values.items():
            given = self.config.searched[name]
            if isinstance(given, list):
                value = next(choice for choice in given if _as_choice(choice) == value)
            if name.startswith(TRL):
                fields[name.removeprefix(TRL)] = value
            else:
                options[name] = value
        return {**options, "trl": fields} if fields else options

    def next_values(self, trials: list[FrozenTrial]) -> dict[str, Any] | None:
        """Values of the trial after these; None if all combinations were tried.

        They depend on the seed and on these trials only, so a sweep that was killed continues as if it had not been.
        """
        tried = [trial.params for trial in trials]
        left: list[dict[str, Any]] = []
        if self.size <= MOST_COMBINATIONS:
            combinations = itertools.product(*map(_values, self.space.values()))
            left = [values for row in combinations if (values := dict(zip(self.space, row, strict=True))) not in tried]
            if not left or self.config.sampler == "grid":
                return left[0] if left else None
        seed = random.Random(f"{self.config.seed} {len(trials)}").getrandbits(31)
        is_random = self.config.sampler == "random"
        sampler = RandomSampler(seed) if is_random else TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS)
        study = optuna.create_study(direction=self.config.direction, sampler=sampler)
        study.add_trials(trials)
        values = study.ask({**self.space}).params
        return random.Random(seed).choice(left) if left and values in tried else values


def check_sweep(config: SweepConfig) -> SweepPlan:
    """Check a run with each listed value and with both ends of each range.

    Raises:
        ConfigError: the sweep cannot work.
        EnvironmentFailed: the environment's file is not valid Python.
    """
    for part, options in (("options", config.options), ("search", config.search)):
        for name in options:
            if name not in TrainConfig.model_fields:
                raise ConfigError(unknown_option(name, TrainConfig.model_fields, f" (in {part})"))
    kinds = {option.name: option.type_name for option in options_of(TrainConfig)}
    space = {name: _distribution(name, given, kinds.get(name)) for name, given in config.searched.items()}
    plan = SweepPlan(config, space)
    if config.sampler == "grid" and plan.size > MOST_COMBINATIONS:
        raise ConfigError(
            f"sampler: a grid has at most {MOST_COMBINATIONS:,} combinations, and a step in each range\n"
            "Search fewer values, or use the sampler tpe or random."
        )
    notes: dict[str, None] = {}
    reshaping = [name for name in space if name in RESHAPING]
    if reshaping and config.objective == "sampled":
        notes[
            f"{', '.join(reshaping)}: changes how held-out completions are sampled as well, so trials differ by it even"
            " without training. Compare them with `objective: greedy`."
        ] = None
    probes = {name: _probes(distribution) for name, distribution in space.items()}
    usual = {name: values[0] for name, values in probes.items()}
    for name, values in probes.items():
        for value in values:
            options = plan.trial_options({**usual, name: value}, output_dir=config.output_dir)
            notes |= dict.fromkeys(check(resolve(TrainConfig, None, options)).notes)
    return SweepPlan(config, space, tuple(notes))


def _distribution(name: str, given: object, kind: str | None) -> Distribution:
    """`kind` is the type name of an option, None for a field of TRL."""
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


def _values(distribution: Distribution) -> Sequence[Any]:
    """All values; empty for a range with infinitely or too many."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    low, high, step = distribution.low, distribution.high, distribution.step
    if step is None or (high - low) / step > MOST_COMBINATIONS:
        return []
    return [min(high, low + number * step) for number in range(round((high - low) / step) + 1)]


def _probes(distribution: Distribution) -> Sequence[Any]:
    """Values to check before the first trial: all of a list, both ends of a range."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    return distribution.low, distribution.high
