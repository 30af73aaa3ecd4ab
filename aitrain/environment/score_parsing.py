"""Parses what an environment returned as a score: a number in the run's range, None for unscored, or a failure;
never a guess."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aitrain.environment.contract import Score
from aitrain.execution.failure import Failure


@dataclass(frozen=True)
class ScoreResult:
    """The score of one episode; None if the environment returned None or failed."""

    score: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None


Bounds = tuple[float, float]
"""The lowest and the highest score that a run allows (`--rl-score-range`)."""

ZERO_TO_ONE: Bounds = (0.0, 1.0)
ROUNDING = 1e-9
"""What a score may be outside of its range and counts as the bound: weighted parts may add up to 1.0000000000000002."""


def parse_score(returned: object, bounds: Bounds = ZERO_TO_ONE) -> ScoreResult:
    """The score of what an environment returned: a number, a Score, a dict with `score`, or None."""
    value, metrics = _unpacked(returned)
    if value is None:
        return ScoreResult(None, metrics)
    low, high = bounds
    expected = "not a finite number" if math.isinf(low) else f"not a number from {low:g} to {high:g}"
    number = _number(value)
    if number is None:
        needs_score = isinstance(returned, Mapping) and "score" not in returned
        why = 'and a dict needs a "score"' if needs_score else expected
        return _unscored("wrong_type", f"returned {shown(returned)}, {why}")
    if not math.isfinite(number):
        return _unscored("not_finite", f"returned {number}, {expected}")
    in_range = min(max(number, low), high)
    if not math.isclose(number, in_range, rel_tol=ROUNDING, abs_tol=ROUNDING):
        why = f"which is not from {low:g} to {high:g} (--rl-score-range LOW,HIGH or any)"
        return _unscored("out_of_range", f"returned {number:g}, {why}")
    return ScoreResult(in_range, metrics)


def _unpacked(returned: Any) -> tuple[Any, dict[str, float]]:
    if isinstance(returned, Score):
        return returned.score, _numbers(returned.metrics)
    if isinstance(returned, Mapping) and "score" in returned:
        rest = {str(key): value for key, value in returned.items() if key != "score"}
        nested = rest.pop("metrics", None)
        return returned["score"], _numbers({**rest, **nested} if isinstance(nested, Mapping) else rest)
    return returned, {}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    numbers = {str(name): _number(value) for name, value in metrics.items()}
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


def _number(value: Any) -> float | None:
    """A float, int, bool, numpy or torch scalar as a float; None for anything else, strings included."""
    if isinstance(value, (int, float)):
        return _as_float(value)
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        try:
            item = value.item()
        except (ValueError, RuntimeError, TypeError):
            return None  # an array of several numbers
        return _as_float(item) if isinstance(item, (int, float)) else None
    return None


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def shown(value: object) -> str:
    """The value and its type, short enough for a message."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _unscored(kind: str, message: str) -> ScoreResult:
    return ScoreResult(None, failure=Failure(kind, message))
