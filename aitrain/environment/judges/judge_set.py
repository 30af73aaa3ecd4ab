"""Several judges with weights, chosen by the `data_source` of a row, as one judge of its answers."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from aitrain.environment.contract import (
    GROUP_ARGUMENTS,
    GROUP_LISTS,
    SCORE_ARGUMENTS,
    UNIT,
    Bounds,
    Score,
    arguments_for,
    parse_score,
    shown,
)
from aitrain.environment.judges.model_judge import RemoteJudge
from aitrain.environment.judges.ranking import Ranking
from aitrain.environment.judges.rubric import Rubric
from aitrain.environment.judges.rules import RULES, SOURCES
from aitrain.environment.user_modules import Place, load_function, source_files
from aitrain.errors import ConfigError, EnvironmentFailed, did_you_mean
from aitrain.execution.async_calls import is_on_shared_loop, run_if_async
from aitrain.execution.failure import CallFailed, Failure
from aitrain.options.value_types import score_bounds

ANY_SOURCE = "*"
"""Name of the judges of rows whose `data_source` has none of its own."""
GIVEN = {*SCORE_ARGUMENTS, *GROUP_ARGUMENTS}
"""Arguments that judges get beside the columns of the row."""
MODELS = {"rubric": Rubric, "ranking": Ranking}
"""Judges that ask a model."""
REMOTE = ("http://", "https://")

JudgeDescription = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""A judge, several, or judges by `data_source`; docs/judges.md describes the forms."""


@dataclass(frozen=True)
class Judge:
    """One judge, and what it counts."""

    name: str
    """Name of its metric."""
    function: Callable[..., Any]
    """Called with what it names of the arguments of `score_episode`; `def` or `async def`."""
    place: str = ""
    """The name of a rule or of a kind of model judge, `file.py:function`, `module:function`, or a URL."""
    weight: float = 1.0
    bounds: Bounds = UNIT
    """Lowest and highest score that it gives."""

    @property
    def compares(self) -> bool:
        """Whether it compares the answers of a group: it names `texts` or `completions`."""
        return not {"texts", "completions"}.isdisjoint(inspect.signature(self.function).parameters)

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """What it returns. Judges wait for each other: it is the answers that are judged at the same time."""
        if is_on_shared_loop():
            raise RuntimeError("judges wait for each other: call them in a method that is `def`, not `async def`")
        return run_if_async(self.function(**arguments_for(self.function, arguments)))

    def add(self, total: Score, returned: object) -> Score:
        """The total with the score of what it returned, which is a metric, as is what it measures.

        Raises:
            CallFailed: that is no score in its range.
        """
        result = parse_score(returned).in_range(self.bounds)
        if result.failure is not None:
            what = f"the judge {self.name} {result.failure.message}".replace("--rl-score-range", "its range")
            raise CallFailed(replace(result.failure, message=what))
        metrics = {**total.metrics, **{f"{self.name}/{name}": value for name, value in result.metrics.items()}}
        if result.score is None:
            return Score(total.score, metrics)
        return Score((total.score or 0.0) + self.weight * result.score, {**metrics, self.name: result.score})


def users_place(place: str) -> Place | None:
    """File or module of a judge of the user's, and its name there; None for other judges."""
    module, _, name = place.rpartition(":")
    return None if not module or place.startswith(REMOTE) else (module, name)


@dataclass(frozen=True)
class Judges:
    """Judges by the `data_source` of the rows that they judge. It has no state, and is called as `score_episode` is."""

    by_source: Mapping[str, Sequence[Judge]]

    def __iter__(self) -> Iterator[Judge]:
        return iter(judge for judges in self.by_source.values() for judge in judges)

    @property
    def source_files(self) -> list[Path]:
        """The user's own files among the judges'."""
        return source_files(filter(None, (users_place(judge.place) for judge in self)))

    @property
    def compares(self) -> bool:
        """Whether any judge compares the answers of a group."""
        return any(judge.compares for judge in self)

    @property
    def score_range(self) -> Bounds:
        """Lowest and highest weighted sum of any row; a judge that leaves an answer out adds 0."""
        lows, highs = [0.0], [0.0]
        for judges in self.by_source.values():
            ends = [[0.0, *(judge.weight * end for end in judge.bounds)] for judge in judges if judge.weight]
            lows.append(sum(map(min, ends)))
            highs.append(sum(map(max, ends)))
        return min(lows), max(highs)

    def __call__(self, **episode: Any) -> Score:
        """The weighted sum for one answer, and the score of each judge as a metric; judges that compare answers are
        left out, see `compare`.

        Raises:
            EnvironmentFailed: there is no judge for the row's `data_source`.
            Exception: a judge failed; the answer has no score.
        """
        total = Score(None)
        for judge in self.judges_of(episode.get("case") or episode):
            if not judge.compares:
                total = judge.add(total, judge.call(episode))
        return total

    def compare(self, **group: Any) -> list[Score]:
        """The weighted sums for the answers of a group, with the judges that compare them; called as `score_group` is,
        with the scores and metrics of the others. An answer without such a score is not compared."""
        judges = self.judges_of(group.get("case") or group)
        comparing = [judge for judge in judges if judge.compares]
        are_all = len(comparing) == len(judges)
        totals = [Score(score, dict(own)) for score, own in zip(group["scores"], group["metrics"], strict=True)]
        compared = [number for number, total in enumerate(totals) if total.score is not None or are_all]
        for name in group.keys() & GROUP_LISTS:
            group[name] = [group[name][number] for number in compared]
        for judge in comparing if compared else ():
            returned = judge.call(group)
            values = returned.tolist() if hasattr(returned, "tolist") else returned
            if not isinstance(values, (list, tuple)) or len(values) != len(compared):
                what = f"returned {shown(returned)}: it must return a list with {len(compared)} scores"
                raise CallFailed(Failure("wrong_type", f"the judge {judge.name} {what}"))
            for number, value in zip(compared, values, strict=True):
                totals[number] = judge.add(totals[number], value)
        return totals

    def judges_of(self, row: Mapping[str, Any]) -> Sequence[Judge]:
        """The judges of a row, by its `data_source`: a name, or names with weights; of such, each judge is named with
        its source.

        Raises:
            EnvironmentFailed: there are none.
        """
        is_one_for_all = [*self.by_source] == [ANY_SOURCE]
        given = ANY_SOURCE if is_one_for_all else row.get("data_source", ANY_SOURCE)
        if not isinstance(given, Mapping):
            return self._of_source(str(given))
        return [
            replace(judge, name=f"{source}/{judge.name}", weight=judge.weight * float(weight))
            for source, weight in given.items()
            for judge in self._of_source(source)
        ]

    def _of_source(self, source: str) -> Sequence[Judge]:
        judges = self.by_source.get(source, self.by_source.get(ANY_SOURCE))
        if judges is None:
            near, known = did_you_mean(source, self.by_source), ", ".join(self.by_source)
            what = "rows without a data_source" if source == ANY_SOURCE else f"the data_source {source}"
            raise EnvironmentFailed(
                f"there is no judge for {what}.{near} (known: {known})\n"
                f'Name one: --rl-env-config \'{{"judges": {{"{source}": "exact"}}}}\''
            )
        return judges

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Check that a row has judges, and the columns that they need.

        Raises:
            EnvironmentFailed: it has not.
            ConfigError: one of them needs math-verify, which is not installed.
        """
        for judge in self.judges_of(row):
            if judge.place == "math" and find_spec("math_verify") is None:
                raise ConfigError(
                    'judges: the rule math needs math-verify\nInstall it with: pip install "aitrain[judges]"'
                )
            for one in inspect.signature(judge.function).parameters.values():
                if one.default is not one.empty or one.kind.name.startswith("VAR") or one.name in GIVEN:
                    continue
                if one.name not in row:
                    raise EnvironmentFailed(
                        f"the judge {judge.name} needs a column {one.name} (there are: {', '.join(row)})\n"
                        f'Map one to it: --rl-env-config \'{{"columns": {{"{one.name}": "its name"}}}}\''
                    )
                # a rule would take None for the text "None", and give empty answers the score of an empty truth
                if judge.place in RULES and (row[one.name] is None or not str(row[one.name]).strip()):
                    raise EnvironmentFailed(
                        f"the judge {judge.name} needs a value in the column {one.name}, which is empty\n"
                        "Leave such rows out, or give them one."
                    )


# -- descriptions


def load(description: JudgeDescription | None = None) -> Judges:
    """The judges of a description, such as `"gsm8k"`, `["exact", "my_judges.py:polite"]`, or judges by `data_source`;
    without one, well-known data sets have their rules. The user's code is imported.

    Raises:
        ConfigError: a judge does not exist, or a setting is wrong.
    """
    if description is None:
        description = SOURCES
    is_by_source = isinstance(description, Mapping) and bool(description) and "judge" not in description
    parts: Any = description if is_by_source else {ANY_SOURCE: description}
    return Judges({str(source): _loaded(one) for source, one in parts.items()})


def _loaded(description: Any) -> list[Judge]:
    """One judge or several; one that would have the name of an earlier one gets a number."""
    judges: list[Judge] = []
    for part in description if isinstance(description, (list, tuple)) else [description]:
        settings = dict(part) if isinstance(part, Mapping) else {"judge": part}
        place = settings.pop("judge", None)
        if not isinstance(place, str) or not place:
            raise ConfigError(
                f"judges: {str(part)[:80]!r} is no judge\nGive a name, such as gsm8k; or an object with its settings,"
                ' such as {"judge": "rubric", "rubric": "...", "url": "...", "model": "..."}.'
            )
        name = str(settings.pop("name", "remote" if place.startswith(REMOTE) else place.rpartition(":")[2]))
        given, weight = settings.pop("range", UNIT), settings.pop("weight", 1.0)
        bounds = score_bounds(given)
        if bounds is None:
            raise ConfigError(f"judges: the range of {name} must be its lowest and highest score, not {given}")
        if type(weight) not in (int, float) or not math.isfinite(weight):
            raise ConfigError(f"judges: the weight of {name} must be a number, not {weight!r}")
        while any(judge.name == name for judge in judges):
            name += "_1"
        judges.append(Judge(name, _function(name, place, settings), place, float(weight), bounds))
    if not judges:
        raise ConfigError("judges: the list of judges is empty")
    return judges


def _function(name: str, place: str, settings: Mapping[str, Any]) -> Any:
    """What judges, with its settings."""
    known: dict[str, Any] = {**RULES, **MODELS}
    if place.startswith(REMOTE):
        function: Any = partial(RemoteJudge, url=place)
    else:
        function = load_function("rl_env", place) if users_place(place) else known.get(place)
    if function is None:
        raise ConfigError(
            f"judges: there is no judge {place}.{did_you_mean(place, known)}\nName one of"
            f" {', '.join(known)}; your own, such as my_judges.py:polite; or a URL."
        )
    is_made = place.startswith(REMOTE) or inspect.isclass(function)  # others are called with an answer
    if is_made or settings:
        _check_settings(name, inspect.signature(function), settings, is_made)
    try:
        return function(**settings) if is_made else partial(function, **settings) if settings else function
    except ConfigError as error:  # its URL
        raise ConfigError(f"judges: {name}: {error}") from None
    except ValidationError as error:  # of a judge of ours; it does not show what was given
        wrong = "; ".join({f"{one['loc'][0]}: {one['msg']}": "" for one in error.errors()})
        raise ConfigError(f"judges: {name}: {wrong}") from None


def _check_settings(name: str, takes: inspect.Signature, settings: Mapping[str, Any], are_all: bool) -> None:
    try:
        (takes.bind if are_all else takes.bind_partial)(**settings)
    except TypeError as error:
        known = list(takes.parameters)
        others = [*known, "name", "weight", "range"]
        near = "".join(did_you_mean(setting, others) for setting in settings if setting not in known)
        key = "; a key belongs into the environment variable of key_name" if "key_name" in known else ""
        raise ConfigError(f"judges: {name}: {error}.{near}\nIt takes: {', '.join(known)}{key}") from None
