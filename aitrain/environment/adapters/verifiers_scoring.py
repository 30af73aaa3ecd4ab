"""The reward functions of verifiers 0.3, whose rubric turns an exception into 0."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from aitrain.environment.adapters.verifiers_messages import for_scorers
from aitrain.environment.adapters.verifiers_settings import Foreign


@dataclass
class RubricOutcome:
    """What verifiers' rubric does not pass on of the scoring of one rollout."""

    error: Exception | None = None
    """Of a function with a weight; the rubric turns it into 0."""
    unknown: set[str] = field(default_factory=set)
    """Functions without a number."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Entries of functions that return several."""

    @classmethod
    def of_this_rollout(cls) -> RubricOutcome:
        """A new one, for the calling task."""
        outcome = cls()
        _current.set(outcome)
        return outcome


_current: ContextVar[RubricOutcome] = ContextVar("rubric_outcome")


def watch_rubric(rubric: Foreign) -> list[Foreign]:
    """Have the functions of a rubric, and of those in it, note what they raise; returns them."""
    inner = [*getattr(rubric, "rubrics", ()), *(env.rubric for env in getattr(rubric, "env_map", {}).values())]
    rubric.funcs[:] = [_watched(one, weight) for one, weight in zip(rubric.funcs, rubric.weights, strict=True)]
    return [*rubric.funcs, *(function for each in inner for function in watch_rubric(each))]


def _watched(function: Foreign, weight: float) -> Foreign:
    @functools.wraps(function)
    async def watched(**given: Foreign) -> float:
        try:
            value = function(**for_scorers(given))
            value = await value if inspect.isawaitable(value) else value
            if isinstance(value, Mapping) and not weight:
                _current.get().metrics.update({f"{function.__name__}/{name}": each for name, each in value.items()})
                raise TypeError("several numbers")
            return float(value)
        except Exception as error:
            _current.get().unknown.add(function.__name__)
            if weight:
                _current.get().error = error
            raise

    return watched
