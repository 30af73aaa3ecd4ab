"""Several judges with weights, chosen by the `data_source` of a row, as one judge of its answers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from aitrain.environment.adapters.settings import bounds_in, weighted
from aitrain.environment.contract import ZERO_TO_ONE, Bounds, Score, ScoreResult, arguments_for, parse_score, shown
from aitrain.environment.judges import rules
from aitrain.environment.judges.ranking import Ranking
from aitrain.environment.judges.remote_judge import RemoteJudge
from aitrain.environment.judges.rubric import Rubric
from aitrain.environment.judges.rules import EXAMPLES, RULES, SOURCES, require_math_verify
from aitrain.environment.user_modules import Place, check_objects, load_object, source_files
from aitrain.errors import ConfigError, EnvironmentFailed, did_you_mean
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


JudgeDescription = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""A judge, several, or judges by `data_source`; docs/judges.md describes the forms."""
MODELS = {"rubric": Rubric, "ranking": Ranking}
"""Judges that ask a model."""
REMOTE = ("http://", "https://")


@dataclass(frozen=True)
class JudgeSpec:
    """The description of one judge."""

    place: str
    """Its name, `file.py:function`, `module:function`, or URL."""
    name: str
    weight: float = 1.0
    bounds: Bounds = ZERO_TO_ONE
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_remote(self) -> bool:
        """Whether it is behind a URL."""
        return self.place.startswith(REMOTE)

    @property
    def users_place(self) -> Place | None:
        """File or module of the user's own judge, and its name there; None for other judges."""
        module, _, name = self.place.rpartition(":")
        return None if self.is_remote or not module else (module, name)

    @property
    def may_hang(self) -> bool:
        """Whether it runs code that should be in a process which can be ended: the user's, and math-verify."""
        return self.users_place is not None or self.place == "math"

    def __str__(self) -> str:
        weight = "" if self.weight == 1 else f"{self.weight:g} x "
        asked = [str(self.settings[name]) for name in ("model", "url") if name in self.settings]
        limits = [
            f"at most {self.settings[name]} {name[4:]}" for name in ("max_calls", "max_tokens") if name in self.settings
        ]
        details = ", ".join(filter(None, (" at ".join(asked), *limits)))
        return f"{weight}{self.name}{f' ({details})' if details else ''}"

    def check(self) -> None:
        """Check it without running the user's code.

        Raises:
            ConfigError: there is no such judge, or a setting is wrong.
        """
        if self.users_place is not None:
            check_objects([self.users_place], "judge")
        elif self.place in RULES:
            if self.settings:
                raise ConfigError(f"judges: the rule {self.place} has no settings, such as {next(iter(self.settings))}")
            if self.place == "math":
                require_math_verify()
        elif self.is_remote or self.place in MODELS:
            self._server_judge()
        else:
            known = [*RULES, *MODELS]
            raise ConfigError(
                f"judges: there is no judge {self.place}.{did_you_mean(self.place, known)}\nName one of"
                f" {', '.join(known)}; your own, such as my_judges.py:polite; or a URL."
            )

    def load(self) -> Judge:
        """The judge, with the user's code imported.

        Raises:
            ConfigError: it cannot be loaded.
        """
        function: Any
        if self.users_place is not None:
            function = load_object(*self.users_place)
            if inspect.isclass(function):
                function = function(**self.settings)
            elif self.settings:
                function = partial(function, **self.settings)
        else:
            function = RULES[self.place] if self.place in RULES else self._server_judge()
        return Judge(self.name, function, self.weight, self.bounds, EXAMPLES.get(self.place))

    def _server_judge(self) -> Any:
        return RemoteJudge(url=self.place, **self.settings) if self.is_remote else MODELS[self.place](**self.settings)


@dataclass(frozen=True)
class JudgeSpecs:
    """The descriptions of judges by `data_source`."""

    by_source: Mapping[str, Sequence[JudgeSpec]]
    is_given: bool = True
    """Whether they are described; else they are those of well-known data sets, most of which a run does not need."""

    @classmethod
    def read(cls, description: JudgeDescription | None) -> JudgeSpecs:
        """Read a description; without one, well-known data sets have their rules.

        Raises:
            ConfigError: it is none.
        """
        if description is None:
            return cls({source: [JudgeSpec(rule, rule)] for source, rule in SOURCES.items()}, is_given=False)
        if isinstance(description, Mapping) and "judge" not in description:
            return cls({str(source): _several(one) for source, one in description.items()})
        return cls({ANY_SOURCE: _several(description)})

    def __str__(self) -> str:
        several = {source: " + ".join(map(str, judges)) for source, judges in self.by_source.items()}
        return "; ".join(
            judges if source == ANY_SOURCE else f"{source}: {judges}" for source, judges in several.items()
        )

    def __iter__(self) -> Iterator[JudgeSpec]:
        return iter(one for several in self.by_source.values() for one in several)

    def check(self) -> None:
        """Check all of them without running the user's code.

        Raises:
            ConfigError: one is wrong.
        """
        for one in self if self.is_given else ():
            one.check()

    def load(self) -> Judges:
        """The judges.

        Raises:
            ConfigError: one cannot be loaded.
        """
        self.check()
        return Judges({source: [one.load() for one in several] for source, several in self.by_source.items()})

    @property
    def source_files(self) -> list[Path]:
        """The user's own files among the judges'."""
        return source_files(place for one in self if (place := one.users_place) is not None)


def load(description: JudgeDescription | None = None) -> Judges:
    """The judges of a description, such as `"gsm8k"`, `["exact", "my_judges.py:polite"]`, or judges by `data_source`.

    Raises:
        ConfigError: a judge does not exist, or a setting is wrong.
    """
    return JudgeSpecs.read(description).load()


def _several(description: Any) -> list[JudgeSpec]:
    parts = description if isinstance(description, (list, tuple)) else [description]
    specs: list[JudgeSpec] = []
    for part in parts:
        spec = _one(part)
        count = sum(other.name.rpartition("_")[0] == spec.name or other.name == spec.name for other in specs)
        specs.append(spec if not count else JudgeSpec(**{**vars(spec), "name": f"{spec.name}_{count}"}))
    if not specs:
        raise ConfigError("judges: the list of judges is empty")
    return specs


def _one(part: Any) -> JudgeSpec:
    settings = dict(part) if isinstance(part, Mapping) else {"judge": part}
    place = settings.pop("judge", None)
    if not isinstance(place, str) or not place:
        raise ConfigError(
            f"judges: {str(part)[:80]!r} is no judge\nGive a name, such as gsm8k; or an object with its settings, such"
            ' as {"judge": "rubric", "rubric": "...", "url": "...", "model": "..."}.'
        )
    short = place.rpartition(":")[2] if not place.startswith(REMOTE) else "remote"
    name, weight, given = settings.pop("name", short), settings.pop("weight", 1.0), settings.pop("range", ZERO_TO_ONE)
    bounds = bounds_in(given)
    if bounds is None:
        raise ConfigError(f"judges: the range of {name} must be its lowest and highest score, not {given}")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise ConfigError(f"judges: the weight of {name} must be a number, not {weight!r}")
    return JudgeSpec(place, str(name), float(weight), bounds, settings)
