"""`--custom-sampler`: the user's function chooses the cases of each batch."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from aitrain.environment.contract import Case, arguments_for
from aitrain.environment.custom_functions import load_function
from aitrain.errors import ConfigError, EnvironmentFailed, did_you_mean
from aitrain.execution.user_code import failure_message
from aitrain.runs.json_values import JsonObject
from aitrain.training.case_order import PlayedGroup

PARAMETERS = ("cases", "count", "scores", "batch", "random")
"""What the function may ask for, by name."""
KEPT_SCORES = 32
"""Latest groups of each case whose scores the function gets."""


def load_sampler(place: str) -> Callable[..., Any]:
    """The user's function.

    Raises:
        ConfigError: it cannot be loaded, or asks for what there is not.
        EnvironmentFailed: its module raised.
    """
    function = load_function("custom_sampler", place)
    for one in inspect.signature(function).parameters.values():
        is_named = one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if is_named and one.default is one.empty and one.name not in PARAMETERS:
            near = did_you_mean(one.name, PARAMETERS)
            raise ConfigError(
                f"custom_sampler: the function has an unknown parameter, {one.name}.{near}\n"
                f"It may have: {', '.join(PARAMETERS)}"
            )
    return function


@dataclass
class CustomOrder:
    """Asks the user's function on the first rank, and sends its answer to the others."""

    function: Callable[..., Any]
    cases: Sequence[Case]
    groups: int
    seed: int
    share: Callable[[list[Any]], list[Any]]
    """Joins lists of all ranks; every rank must call it."""
    is_first: bool
    learns: bool = field(default=True, init=False)
    _scores: dict[int, list[float]] = field(default_factory=dict, init=False)
    """Mean scores of each case's groups, the latest one last."""
    _last: int = field(default=0, init=False)

    def batch(self, index: int) -> list[int]:
        """The function's choice."""
        self._last = index
        return self._ask(self.groups, random.Random(f"{self.seed}/sampler/{index}"))

    def others(self, replaced: Sequence[int], used: Collection[int]) -> list[int]:
        """What the function chooses instead, without the cases that are in use."""
        source = random.Random(f"{self.seed}/sampler/{self._last}/{len(used)}")
        chosen = dict.fromkeys(self._ask(len(replaced), source))
        return [case for case in chosen if case not in used]

    def see(self, groups: Sequence[PlayedGroup]) -> None:
        """Keep the mean score of each group that has one."""
        for group in groups:
            if group.scores:
                scores = [*self._scores.get(group.case, ()), sum(group.scores) / len(group.scores)]
                self._scores[group.case] = scores[-KEPT_SCORES:]

    def metrics(self) -> dict[str, float]:
        """The share of the cases that have a score."""
        return {"cases/played": len(self._scores) / len(self.cases)}

    def state(self) -> JsonObject:
        """The kept scores."""
        return {"scores": {str(case): scores for case, scores in self._scores.items()}}

    def restore(self, state: JsonObject) -> None:
        """Continue with these scores."""
        scores = state.get("scores")
        if isinstance(scores, dict):
            self._scores = {int(case): list(map(float, found)) for case, found in scores.items()}

    @cached_property
    def _rows(self) -> list[Mapping[str, Any]]:
        return [MappingProxyType(dict(case.row)) for case in self.cases]

    def _ask(self, count: int, source: random.Random) -> list[int]:
        answers = self.share([self._answer(count, source)] if self.is_first else [])
        if isinstance(answers[0], EnvironmentFailed):
            raise answers[0]
        return list(answers[0])

    def _answer(self, count: int, source: random.Random) -> list[int] | EnvironmentFailed:
        """The function's answer, or what is wrong with it; an error must reach all ranks."""
        scores = [tuple(self._scores.get(case, ())) for case in range(len(self.cases))]
        values = {"cases": self._rows, "count": count, "scores": scores, "batch": self._last, "random": source}
        try:
            answer = list(self.function(**arguments_for(self.function, values)))
        except Exception as error:
            return EnvironmentFailed(failure_message("custom_sampler raised", error))
        if len(answer) != count:
            return EnvironmentFailed(f"custom_sampler returned {len(answer)} case numbers, and not count={count}")
        for one in answer:
            if isinstance(one, bool) or not hasattr(one, "__index__") or not 0 <= int(one) < len(self.cases):
                last = len(self.cases) - 1
                return EnvironmentFailed(f"custom_sampler returned {one!r:.60}, and cases are numbered 0 to {last}")
        return [int(one) for one in answer]
