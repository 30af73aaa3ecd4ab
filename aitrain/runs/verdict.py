"""Whether a model is better than another one, by the interval of the mean change of the cases that both were scored
on, and its p-value.

An interval of few cases or of scores of 0 and 1 may leave out 0 a little more often than it should. The sign-flip test
does not: two models that are equally good at every case get a verdict in at most 5 of 100 comparisons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from aitrain.runs.held_out import IntervalValues, ScoreTable, interval_text

ALPHA = 0.05
"""A p-value up to this is a detected difference."""

Verdict: TypeAlias = Literal["better", "worse", "undetected"]
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
    if p_value is not None:  # runs of earlier versions have none
        if p_value > ALPHA:
            return "undetected"
        if low is None or high is None:  # scores without bounds that all changed by the same
            low = high = change["mean"]
    if low is not None and low > 0:
        return "better"
    return "worse" if high is not None and high < 0 else "undetected"


def verdict_of_scores(table: ScoreTable | None) -> Verdict | None:
    """The verdict on `scores` of a result.json: that of sampled completions, which the training improves."""
    return verdict_of(table["sampled"]["change"]) if table and "sampled" in table else None


def verdict_sentence(change: IntervalValues | None) -> str:
    """`better: +0.412 [+0.301, +0.524] over 64 cases`; empty if there is no verdict."""
    verdict = verdict_of(change)
    if verdict is None or change is None:
        return ""
    count = change["count"]
    cases = "" if count is None else f" over {count} case{'s' * (count != 1)}"
    return f"{VERDICT_WORDS[verdict]}: {interval_text(change, True)}{cases}"
