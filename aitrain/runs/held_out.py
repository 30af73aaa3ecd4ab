"""Held-out scores before and after the training, with intervals: computed for result.json, from which the terminal, the
model card and the page show them.

A scoring holds the scores of each case's samples; its mean is the mean of the cases' means. pass@K is the mean
probability that at least one of K samples of a case is solved, that is, has the highest possible score.

The verdict says whether a model is better than another one, by the interval of the mean change of the cases that both
were scored on, and its p-value. An interval of few cases or of scores of 0 and 1 may leave out 0 a little more often
than it should. The sign-flip test does not: two models that are equally good at every case get a verdict in at most 5
of 100 comparisons.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NotRequired, TypeVar, final

from pydantic import TypeAdapter
from typing_extensions import TypedDict  # which pydantic needs before Python 3.12

from aitrain.environment.contract import UNIT, Bounds
from aitrain.options.value_types import score_bounds

K = TypeVar("K")
V = TypeVar("V")

Scoring = Mapping[str, Sequence[float]]
"""Scores of each case's samples, by its row number; without samples that could not be scored."""


@final
class IntervalValues(TypedDict):
    """An interval in JSON; limits and count are None if only the mean is known."""

    mean: float
    low: float | None
    high: float | None
    count: int | None
    p_value: NotRequired[float | None]
    """Of a change: its sign-flip test."""


@final
class ScoreRow(TypedDict):
    """Held-out scores with one decoding, and the change of the cases that are in both."""

    before: IntervalValues | None
    after: IntervalValues | None
    change: IntervalValues | None


ScoreTable = dict[str, ScoreRow]
"""Rows by `sampled`, `greedy` and, if cases have K samples, `pass@K`."""
SCORES = TypeAdapter(dict[str, ScoreRow | IntervalValues | None])

DECODINGS = ("sampled", "greedy")
NEARLY = 1e-9
"""Fraction of the score range by which a solved case may be below the highest score, for rounding."""


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of (key, value) pairs by their keys, such as the scores of samples by their cases."""
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def recorded_table(value: object) -> ScoreTable | None:
    """`scores` of a result.json, those of an eval as scores after training; None if it has none."""
    try:
        rows = SCORES.validate_python(value)
    except ValueError:
        return None
    return {
        name: row if "before" in row else {"before": None, "after": row, "change": None}
        for name, row in rows.items()
        if row is not None
    }


def bounds_of(score_range: object) -> Bounds | None:
    """Lowest and highest score by the option rl_score_range; None for `any`, 0 and 1 for runs without the option."""
    low, high = (score_bounds(score_range) if isinstance(score_range, str) else None) or UNIT
    return (low, high) if math.isfinite(high - low) else None


def table_texts(table: ScoreTable) -> list[tuple[str, str, str, str]]:
    """The names of the rows that have a score, with the intervals before and after, and of the change, as text."""
    return [
        (
            name,
            interval_text(row["before"]),
            interval_text(row["after"]),
            interval_text(row["change"], True),
        )
        for name, row in table.items()
        if row["before"] or row["after"]
    ]


def titled_table(table: ScoreTable, before: str, after: str) -> str:
    """The rows of `table_texts` in columns below their titles; empty without scores."""
    rows = [("held-out", before, after, "change"), *table_texts(table)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows) if rows[1:] else ""


def interval_text(value: IntervalValues | None, is_change: bool = False) -> str:
    """`0.612 [0.482, 0.728]`, with signs for a change."""
    if value is None:
        return "-"
    sign = "+" if is_change else ""
    mean = f"{value['mean']:{sign}.3f}"
    if value["low"] is None:
        return mean
    return f"{mean} [{value['low']:{sign}.3f}, {value['high']:{sign}.3f}]"


# -- the verdict

ALPHA = 0.05
"""A p-value up to this is a detected difference."""

Verdict = Literal["better", "worse", "undetected"]
"""`undetected`: no detectable difference; the interval contains 0, or the p-value is above ALPHA, or there is
neither."""

VERDICT_WORDS: Mapping[Verdict, str] = {
    "better": "better",
    "worse": "worse",
    "undetected": "no detectable difference",
}
VERDICT_STYLES: Mapping[Verdict, str] = {"better": "green", "worse": "red", "undetected": "yellow"}
"""Colours of Rich; pages use the verdict as the name of a class."""


def verdict_of(change: IntervalValues | None) -> Verdict | None:
    """The verdict on a mean change, as in `ScoreRow.change`; None if there is no case that both were scored on."""
    if change is None:
        return None
    low, high, p_value = change["low"], change["high"], change.get("p_value")
    if p_value is None or p_value > ALPHA:
        return "undetected"
    if low is None or high is None:  # scores without bounds that all changed by the same
        low = high = change["mean"]
    return "better" if low > 0 else "worse" if high < 0 else "undetected"


def verdict_of_scores(table: ScoreTable | None) -> Verdict | None:
    """The verdict on `scores` of a result.json: that of sampled completions, which the training improves."""
    return verdict_of(table["sampled"]["change"]) if table and "sampled" in table else None


def verdict_sentence(change: IntervalValues | None) -> str:
    """`better: +0.412 [+0.301, +0.524] over 64 cases`; empty if there is no verdict."""
    verdict = verdict_of(change)
    if verdict is None or change is None:
        return ""
    count = change["count"]
    return f"{VERDICT_WORDS[verdict]}: {interval_text(change, True)} over {count} case{'s' * (count != 1)}"
