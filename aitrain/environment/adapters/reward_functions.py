"""Reward functions with TRL's signature, several with weights: `f(prompts, completions, **columns)` returns a list."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aitrain.environment.adapters.answer_rules import RULES
from aitrain.environment.adapters.settings import weighted
from aitrain.environment.contract import Score, arguments_for
from aitrain.environment.user_modules import Place, check_objects, load_object
from aitrain.errors import ConfigError, did_you_mean
from aitrain.execution.async_calls import run_if_async

Lists = Mapping[str, Sequence[object]]
"""Arguments of reward functions, one entry for each completion."""
NOT_PASSED = {"prompt", "completion", "completion_ids"}
"""Columns that TRL does not pass to reward functions."""


class Rewards:
    """Functions by name, with their weights."""

    def __init__(self, places: Sequence[Place], weights: Sequence[float] | None) -> None:
        if weights is not None and len(weights) != len(places):
            raise ConfigError(f"rl_env_config: {len(weights)} weights for {len(places)} reward functions")
        self.functions: dict[str, Callable[..., Any]] = {}
        self.weights: dict[str, float] = {}
        for (module, name), weight in zip(places, weights or [1.0] * len(places), strict=True):
            own = name if name not in self.functions else f"{name}_{len(self.functions)}"
            self.functions[own] = load_object(module, name) if module else RULES[name]
            self.weights[own] = float(weight)

    def takes(self, name: str) -> bool:
        """Whether a function names this parameter."""
        return any(name in inspect.signature(function).parameters for function in self.functions.values())

    def of_one(self, row: Mapping[str, object], **arguments: object) -> Score:
        """The weighted sum for one completion; each argument becomes a list of one."""
        rewards, metrics = self.call(self.functions, row, {name: [value] for name, value in arguments.items()})
        score = self.total({name: values[0] for name, values in rewards.items()})
        return Score(score.score, {**metrics, **score.metrics})

    def total(self, rewards: Mapping[str, float | None]) -> Score:
        """The weighted sum of one reward of each function."""
        return weighted({name: (rewards.get(name), weight) for name, weight in self.weights.items()})

    def call(
        self, names: Iterable[str], row: Mapping[str, object], lists: Lists
    ) -> tuple[dict[str, list[float | None]], dict[str, float]]:
        """The rewards of each function for completions of one row, and the metrics that functions logged.

        Raises:
            ValueError: a function returned another number of rewards.
        """
        count, metrics, rewards = len(lists["completions"]), dict[str, float](), {}
        columns = {name: [value] * count for name, value in row.items() if name not in NOT_PASSED}
        log = {"log_extra": lambda column, values: None, "log_metric": metrics.__setitem__, "trainer_state": None}
        for name in names:
            function = self.functions[name]
            rewards[name] = list(run_if_async(function(**arguments_for(function, {**columns, **lists, **log}))))
            if len(rewards[name]) != count:
                raise ValueError(f"{name} returned {len(rewards[name])} rewards for {count} completions")
        return rewards, metrics

    def comparing(self, row: Mapping[str, object], lists: Lists) -> tuple[list[str], list[str]]:
        """Names of the functions that reward these completions otherwise together than one by one, or only together;
        and of those that reward them in neither way."""
        found, failed = list[str](), list[str]()
        for name in self.functions:
            try:
                together = self.call([name], row, lists)[0][name]
            except Exception:
                failed.append(name)  # the first episode shows it, with its place
                continue
            try:
                alone = [
                    self.call([name], row, {key: [values[i]] for key, values in lists.items()})[0][name][0]
                    for i in range(len(together))
                ]
            except Exception:
                alone = []
            found += [name] if together != alone else []
        return found, failed


def check_functions(places: Sequence[Place]) -> None:
    """Check functions and rules without running anything.

    Raises:
        ConfigError: a file, or a function in it, does not exist, or there is no such rule.
    """
    for module, name in places:
        if not module and name not in RULES:
            raise ConfigError(
                f"rl_env: there is no reward function {name}.{did_you_mean(name, RULES)}\nName functions of a file, as"
                f" in reward:my_rewards.py:exact,short, or a rule: {', '.join(RULES)}"
            )
    check_objects([place for place in places if place[0]], "function")
