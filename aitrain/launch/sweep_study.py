"""What Optuna decides in a sweep: the values of the next trial, and whether a trial is ended early.

Optuna's study is in memory: for each trial it gets the recorded trials, and a seed derived from the trial's number. So
Optuna stores nothing, and a sweep that was killed continues as if it had not been.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aitrain.launch.search_space import MOST_COMBINATIONS, SearchedOption, SearchSpace, tidy
from aitrain.options.sweep import SweepConfig
from aitrain.runs.sweep_record import Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.study import Study

RANDOM_TRIALS = 5
"""Trials with random values before the Parzen estimator begins."""
HALVING = 2
"""Successive halving keeps one trial of this many."""


def propose(config: SweepConfig, space: SearchSpace, trials: Sequence[Trial]) -> dict[str, object] | None:
    """Values of the next trial; None if all combinations were tried. In a finite space none is tried twice."""
    if config.sampler == "grid":
        return next(itertools.islice(space.combinations(), len(trials), None), None)
    study = _study(config, space, trials, len(trials))
    asked = study.ask(_distributions(space)).params
    values = {option.name: _decoded(option, asked[option.name]) for option in space.options}
    if space.size is None or space.size > MOST_COMBINATIONS or all(trial.values != values for trial in trials):
        return values
    left = [one for one in space.combinations() if all(trial.values != one for trial in trials)]
    return random.Random(f"{config.seed} {len(trials)}").choice(left) if left else None


def should_prune(config: SweepConfig, space: SearchSpace, trial: Trial, trials: Sequence[Trial]) -> bool:
    """Whether a trial is to be ended, by its held-out scores so far and those of all trials."""
    if config.pruner == "none":
        return False
    study = _study(config, space, [one for one in trials if one.has_ended], trial.number)
    asked = study.ask()
    answers = []
    for step, score in sorted(trial.scores.items()):
        asked.report(score, step)
        answers.append(asked.should_prune())
    return any(answers[-1:])


def _study(config: SweepConfig, space: SearchSpace, trials: Sequence[Trial], number: int) -> Study:
    """A study that knows these trials, with the sampler of trial `number`."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction=config.direction, sampler=_sampler(config, number), pruner=_pruner(config))
    state = optuna.trial.TrialState
    distributions = _distributions(space)
    for trial in trials:
        study.enqueue_trial({option.name: _encoded(option, trial.values[option.name]) for option in space.options})
        asked = study.ask(distributions)
        for step, score in sorted(trial.scores.items()):
            asked.report(score, step)
            asked.should_prune()  # successive halving notes the trial's rung
        if trial.score is not None:
            study.tell(asked, trial.score)
        elif trial.has_ended:
            study.tell(asked, state=state.PRUNED if trial.status == "pruned" and trial.scores else state.FAIL)
    return study


def _sampler(config: SweepConfig, number: int) -> BaseSampler:
    from optuna.samplers import RandomSampler, TPESampler

    seed = random.Random(f"{config.seed} {number}").getrandbits(31)
    if config.sampler == "random":
        return RandomSampler(seed=seed)
    return TPESampler(seed=seed, n_startup_trials=RANDOM_TRIALS)


def _pruner(config: SweepConfig) -> BasePruner:
    from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner

    if config.pruner == "median":
        return MedianPruner(n_startup_trials=config.prune_after_trials, n_warmup_steps=config.prune_after_step)
    return SuccessiveHalvingPruner(reduction_factor=HALVING) if config.pruner == "halving" else NopPruner()


def _distributions(space: SearchSpace) -> dict[str, BaseDistribution]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, BaseDistribution] = {}
    for option in space.options:
        if option.choices:
            found[option.name] = CategoricalDistribution([json.dumps(value) for value in option.choices])
        elif option.is_integer:
            found[option.name] = IntDistribution(int(option.low), int(option.top), option.log, int(option.step or 1))
        else:
            found[option.name] = FloatDistribution(option.low, option.top, option.log, option.step)
    return found


def _encoded(option: SearchedOption, value: object) -> object:
    """A value as Optuna has it: an item of a list as JSON."""
    return json.dumps(value) if option.choices else value


def _decoded(option: SearchedOption, value: object) -> object:
    if option.choices:
        return json.loads(str(value))
    return tidy(value) if option.step and isinstance(value, float) else value
