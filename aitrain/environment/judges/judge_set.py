"""Several judges with weights, chosen by the `data_source` of a row, as one judge of its answers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from aitrain.environment.adapters.settings import weighted
from aitrain.environment.contract import Score, arguments_for
from aitrain.environment.judges import rules
from aitrain.environment.score_parsing import ZERO_TO_ONE, Bounds, ScoreResult, parse_score, shown
from aitrain.errors import EnvironmentFailed, did_you_mean
from aitrain.execution.async_calls import is_on_shared_loop, run_async
from aitrain.execution.failure import CallFailed, Failure

ANY_SOURCE = "*"
"""Name of the judges of rows whose `data_source` has none of its own."""
GIVEN = {"completion", "case_idx", "prompt", "case", "messages", "text", "completions", "texts", "scores", "metrics"}
"""Arguments that judges get beside the columns of the row."""


@dataclass(frozen=True)
class Judge:
    """One judge, and what it counts."""

    name: str
    """Name of its metric."""
    function: Callable[..., Any]
    """Called with what it names of the arguments of `score_episode`; `def` or `async def`."""
    weight: float = 1.0
    bounds: Bounds = ZERO_TO_ONE
    """Lowest and highest score that it gives."""
    example: str | None = None
    """A right answer for a rule, with the ground truth in the place of the braces."""

    @property
    def compares(self) -> bool:
        """Whether it compares the answers of a group: it names `texts` or `completions`."""
        return not {"texts", "completions"}.isdisjoint(inspect.signature(self.function).parameters)

    def parsed(self, returned: object) -> ScoreResult:
        """The score of what it returned.

        Raises:
            CallFailed: that is no score in its range.
        """
        result = parse_score(returned, self.bounds)
        if result.failure is not None:
            kind, message = result.failure.kind, result.failure.message
            raise CallFailed(Failure(kind, f"the judge {self.name} {message}".replace("--rl-score-range", "its range")))
        return result

    def missing(self, row: Mapping[str, object]) -> list[str]:
        """Parameters that it needs and the row has not."""
        parameters = inspect.signature(self.function).parameters.values()
        needed = [one for one in parameters if one.default is one.empty and not one.kind.name.startswith("VAR")]
        return [one.name for one in needed if one.name not in GIVEN and one.name not in row]


@dataclass(frozen=True)
class Judges:
    """Judges by the `data_source` of the rows that they judge. It has no state, and is called as `score_episode` is."""

    by_source: Mapping[str, Sequence[Judge]]

    def __call__(self, **episode: Any) -> Score:
        """The weighted sum for one answer, and the score of each judge as a metric; judges that compare answers are
        left out, see `compare`.

        Raises:
            EnvironmentFailed: there is no judge for the row's `data_source`.
            Exception: a judge failed; the answer has no score.
        """
        alone = [judge for judge in self.judges_of(_row(episode)) if not judge.compares]
        results = _called(alone, episode)
        return _total([(judge, judge.parsed(value)) for judge, value in zip(alone, results, strict=True)])

    def compare(self, texts: Sequence[str], metrics: Sequence[Mapping[str, float]], **group: Any) -> list[Score]:
        """The weighted sums for the answers of a group, with the judges that compare them; called as `score_group` is.
        An answer without a score of its own is not compared."""
        judges = self.judges_of(_row(group))
        alone = [judge for judge in judges if not judge.compares]
        known = [n for n, own in enumerate(metrics) if not alone or any(judge.name in own for judge in alone)]
        lists = {"texts": texts, "metrics": metrics, **group}
        own = {name: [lists[name][n] for n in known] for name in _LISTS if name in lists}
        comparing = [judge for judge in judges if judge.compares] if known else []
        columns = [_column(judge, value, len(known)) for judge, value in zip(
            comparing, _called(comparing, {**lists, **own}), strict=True)]  # fmt: skip
        scores = [Score(None, dict(one)) for one in metrics]
        for place, number in enumerate(known):
            before = [(judge, ScoreResult(metrics[number].get(judge.name))) for judge in alone]
            now = [(judge, column[place]) for judge, column in zip(comparing, columns, strict=True)]
            total = _total([*before, *now])
            scores[number] = Score(total.score, {**metrics[number], **total.metrics})
        return scores

    @property
    def compares(self) -> bool:
        """Whether any judge compares the answers of a group."""
        return any(judge.compares for judges in self.by_source.values() for judge in judges)

    @property
    def score_range(self) -> Bounds:
        """Lowest and highest weighted sum of any row; a judge that leaves an answer out adds 0."""
        low = high = 0.0
        for judges in self.by_source.values():
            ends = [[judge.weight * end for end in judge.bounds] for judge in judges if judge.weight]
            low, high = (
                min(low, sum(min(0.0, *pair) for pair in ends)),
                max(high, sum(max(0.0, *pair) for pair in ends)),
            )
        return low, high

    def judges_of(self, row: Mapping[str, Any]) -> list[Judge]:
        """The judges of a row, by its `data_source`: a name, or names with weights.

        Raises:
            EnvironmentFailed: there are none.
        """
        source = row.get("data_source", ANY_SOURCE)
        if not isinstance(source, Mapping):
            return list(self._named(str(source)))
        return [
            replace(judge, weight=judge.weight * float(weight))
            for name, weight in source.items()
            for judge in self._named(str(name))
        ]

    def _named(self, source: str) -> Sequence[Judge]:
        found = self.by_source.get(source, self.by_source.get(ANY_SOURCE))
        if found is None:
            near, known = did_you_mean(source, self.by_source), ", ".join(self.by_source)
            what = "rows without a data_source" if source == ANY_SOURCE else f"the data_source {source}"
            raise EnvironmentFailed(
                f"there is no judge for {what}.{near} (known: {known})\n"
                f'Name one: --rl-env-config \'{{"judges": {{"{source}": "exact"}}}}\''
            )
        return found

    def check_row(self, row: Mapping[str, Any], place: str) -> None:
        """Check that a row has judges, and the columns that they need.

        Raises:
            EnvironmentFailed: it has not.
        """
        try:
            judges = self.judges_of(row)
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"{place}: {error}") from None
        for judge in judges:
            if judge.function is rules.math:
                rules.require_math_verify()
            for name in judge.missing(row):
                raise EnvironmentFailed(
                    f"{place}: the judge {judge.name} needs a column {name} (there are: {', '.join(row)})\n"
                    f'Map one to it: --rl-env-config \'{{"columns": {{"{name}": "its name"}}}}\''
                )


_LISTS = ("texts", "completions", "messages", "scores", "metrics")
"""Arguments of `score_group` with one entry for each answer."""


def _row(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    row: Mapping[str, Any] = arguments.get("case") or arguments
    return row


def _called(judges: Sequence[Judge], arguments: Mapping[str, Any]) -> list[Any]:
    """What the judges return; those that are `async def` wait at the same time."""
    if is_on_shared_loop():
        raise RuntimeError("judges wait for each other: call them in a method that is `def`, not `async def`")
    results: list[Any] = []
    with ExitStack() as not_awaited:  # those before a judge that raises
        for judge in judges:
            results.append(judge.function(**arguments_for(judge.function, arguments)))
            if inspect.iscoroutine(results[-1]):
                not_awaited.callback(results[-1].close)
        not_awaited.pop_all()
    waiting = [result for result in results if inspect.isawaitable(result)]
    if waiting:
        arrived = iter(run_async(_all(waiting)))
        results = [next(arrived) if inspect.isawaitable(result) else result for result in results]
    return results


async def _all(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*waiting))


def _column(judge: Judge, returned: Any, count: int) -> list[ScoreResult]:
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, (list, tuple)) or len(values) != count:
        message = f"the judge {judge.name} returned {shown(returned)}: it must return a list with {count} scores"
        raise CallFailed(Failure("wrong_type", message))
    return [judge.parsed(value) for value in values]


def _total(results: Sequence[tuple[Judge, ScoreResult]]) -> Score:
    """The weighted sum, with the score of each judge and what it measures as metrics."""
    total = weighted({judge.name: (result.score, judge.weight) for judge, result in results})
    parts = {f"{judge.name}/{name}": value for judge, result in results for name, value in result.metrics.items()}
    return Score(total.score, {**parts, **total.metrics})
