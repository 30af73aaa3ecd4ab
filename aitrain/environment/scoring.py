"""Score a batch of completions with the user's environment. A score that could not be had is missing data, never 0."""

from __future__ import annotations

import inspect
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from aitrain.environment.contract import Completion, Score, chosen, finished, named_by, run_async
from aitrain.environment.loading import failure
from aitrain.errors import EnvironmentFailed

PATIENCE = 3
"""Batches in a row without a single score, after which a run is given up."""

FAILURE_KINDS = ("raised", "wrong_type", "not_finite", "out_of_range")


@dataclass(frozen=True)
class Failure:
    """Why an episode has no score; `kind` is one of FAILURE_KINDS."""

    kind: str
    message: str
    trace: str = ""


@dataclass(frozen=True)
class Scored:
    """One episode's score from 0 to 1, or None: unscored, because the environment said so or because it failed."""

    score: float | None
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None


@dataclass(frozen=True)
class Scorer:
    """The environment's `score_episode`, for many completions at a time."""

    environment: Any
    model: Any
    tokenizer: Any

    def score(self, completions: Sequence[Completion]) -> list[Scored]:
        """One result for each completion, in their order; never raises for what the environment does."""
        if inspect.iscoroutinefunction(self.environment.score_episode):
            return list(run_async(self._score_together(completions)))
        return [self._score_one(completion) for completion in completions]

    async def _score_together(self, completions: Sequence[Completion]) -> list[Scored]:
        import asyncio

        return await asyncio.gather(*(self._score_async(completion) for completion in completions))

    async def _score_async(self, completion: Completion) -> Scored:
        import asyncio

        start = time.perf_counter()
        try:
            returned = await self.environment.score_episode(**self._arguments(completion))
            return judged(returned, time.perf_counter() - start)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return _raised(error, time.perf_counter() - start)

    def _score_one(self, completion: Completion) -> Scored:
        start = time.perf_counter()
        try:
            returned = finished(self.environment.score_episode(**self._arguments(completion)))
            return judged(returned, time.perf_counter() - start)
        except (Exception, SystemExit) as error:
            return _raised(error, time.perf_counter() - start)

    def _arguments(self, completion: Completion) -> dict[str, Any]:
        words = {**completion.words(), "model": self.model, "tokenizer": self.tokenizer}
        return chosen(self._names, words)

    @cached_property
    def _names(self) -> tuple[str, ...] | None:
        """What `score_episode` asks for, read once: reading a signature takes longer than most scores."""
        return named_by(self.environment.score_episode)


def judged(returned: object, seconds: float) -> Scored:
    """What `score_episode` returned, as a score: a number, a Score, a dict with `score`, or None."""
    value, metrics = _unpacked(returned)
    if value is None:
        return Scored(None, seconds, metrics)
    number = _number(value)
    if number is None:
        return _unscored("wrong_type", f"returned {_shown(returned)}, {_expected(returned)}", seconds)
    if not math.isfinite(number):
        return _unscored("not_finite", f"returned {number}, not a number from 0 to 1", seconds)
    if not 0.0 <= number <= 1.0:
        return _unscored("out_of_range", f"returned {number:g}, which is not from 0 to 1", seconds)
    return Scored(number, seconds, metrics)


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
    """A float, int, bool, or a numpy or torch scalar, as a float; None for anything else (a string is no number)."""
    if isinstance(value, (int, float)):
        return _as_float(value)
    if hasattr(value, "item") and getattr(value, "size", 1) != 0:
        try:
            item = value.item()
        except (ValueError, RuntimeError, TypeError):
            return None  # an array of several
        return _as_float(item) if isinstance(item, (int, float)) else None
    return None


def _as_float(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _expected(returned: object) -> str:
    if isinstance(returned, Mapping) and "score" not in returned:
        return 'and a dict needs a "score"'
    return "not a number from 0 to 1"


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _unscored(kind: str, message: str, seconds: float) -> Scored:
    return Scored(None, seconds, failure=Failure(kind, message))


def _raised(error: BaseException, seconds: float) -> Scored:
    trace = "".join(traceback.format_exception(error))
    return Scored(None, seconds, failure=Failure("raised", failure("raised", error), trace))


@dataclass
class FailureCount:
    """Failures over a whole run: what to tell the user once, and when to give up."""

    told: set[str] = field(default_factory=set)
    batches: int = 0
    scored: int = 0
    empty_batches: int = 0

    def first_of_each(self, failures: Sequence[tuple[str, str]]) -> list[str]:
        """Of (kind, message) pairs, the messages of kinds that have not been told in this run."""
        news = {kind: message for kind, message in reversed(failures) if kind not in self.told}
        self.told |= set(news)
        return list(news.values())

    def after_batch(self, scores: int, failures: int) -> None:
        """Note a batch, counted over all processes.

        Raises:
            EnvironmentFailed: nothing could be scored, for the third batch in a row.
        """
        self.batches += 1
        self.scored += scores
        is_empty = not scores and (failures or not self.scored)
        self.empty_batches = self.empty_batches + 1 if is_empty else 0
        if self.empty_batches >= PATIENCE:
            raise EnvironmentFailed(self._nothing_to_learn_from(f"{PATIENCE} batches in a row"))

    def after_run(self) -> None:
        """A run in which nothing was scored has learned nothing.

        Raises:
            EnvironmentFailed: it is one.
        """
        if self.batches and not self.scored:
            raise EnvironmentFailed(self._nothing_to_learn_from("the whole run"))

    def _nothing_to_learn_from(self, where: str) -> str:
        if self.told:
            return (
                f"The environment failed on every episode of {where}: there is nothing to learn from.\n"
                "The first failure is shown above; all of them are in rollouts/."
            )
        return (
            f"score_episode returned None for every episode of {where}: there is nothing to learn from.\n"
            "Is a `return` missing? None means that an episode cannot be scored."
        )
