"""The page of a comparison: one HTML file that needs a script for its filters only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from aitrain.redaction import redact
from aitrain.runs.comparison import CasePair, Comparison, Outcome, compare_all, telling_samples
from aitrain.runs.held_out import interval_text
from aitrain.runs.json_values import JsonObject
from aitrain.runs.recorded_scoring import read_scorings
from aitrain.runs.verdict import VERDICT_WORDS
from aitrain.ui.comparison_text import p_text
from aitrain.ui.episodes import Limit, episode
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.overview import short_name
from aitrain.ui.page import asset, rendered

STYLES = ("page.css", "comparison.css")
SCRIPTS = ("dom.js", "theme.js", "comparison.js")
MOST_CASES: dict[Outcome, int] = {"lost": 60, "won": 60, "equal": 20, "unscored": 20}
"""Maximum number of cases with transcripts, of each outcome."""
MOST_ROWS = 5_000
"""Maximum number of cases that are listed."""
MOST_SAMPLES = 4
IN_THE_PAGE = Limit(text=6_000, first=40, last=10)


def comparison_page(a: Path, b: Path) -> str:
    """The page of two runs or evals; of the same run twice, its model before training compared with the one after.

    Raises:
        ConfigError: they cannot be compared.
    """
    return page_of_comparisons(compare_all(read_scorings([a] if a.resolve() == b.resolve() else [a, b])))


def page_of_comparisons(comparisons: Sequence[Comparison]) -> str:
    """The page of some models that are compared with the same one."""
    return rendered(
        "comparison.html",
        list(map(asset, STYLES)),
        list(map(asset, SCRIPTS)),
        title=f"{comparisons[0].b.label} compared with {comparisons[0].a.label}",
        views=list(map(_view, comparisons)),
        written=time.strftime("%Y-%m-%d %H:%M"),
        words=VERDICT_WORDS,
        outcomes=MOST_CASES,
        interval=interval_text,
        p_text=p_text,
        shown=escape_controls,
        short_name=short_name,
    )


def _view(comparison: Comparison) -> JsonObject:
    ranked = sorted(comparison.pairs, key=lambda pair: -abs(pair.difference or 0.0))[:MOST_ROWS]
    changes = [row.change for row in comparison.rows]
    limits = [abs(limit) for change in changes for limit in (change["low"], change["high"], change["mean"]) if limit]
    told = {id(pair) for outcome, most in MOST_CASES.items() for pair in comparison.cases(outcome)[:most]}
    return {
        "c": comparison,
        "notes": [redact(note) for note in comparison.notes],
        "counts": {outcome: len(comparison.cases(outcome)) for outcome in MOST_CASES},
        "reach": max(limits, default=1.0),
        "cases": [(pair, _sides(comparison, pair) if id(pair) in told else []) for pair in ranked],
    }


def _sides(comparison: Comparison, pair: CasePair) -> list[list[JsonObject]]:
    """Some episodes of a case by each model, beginning with the one that shows the difference best; nothing of a case
    that an interrupted eval lacks."""
    cases = [(comparison.a, pair.a), (comparison.b, pair.b)]
    if not all(case.samples[comparison.decoding] for _, case in cases):
        return []
    sides = []
    for (scoring, case), first in zip(cases, telling_samples(comparison, pair), strict=True):
        numbers = [sample.number for sample in case.samples[comparison.decoding].values()]
        numbers.sort(key=lambda number: number != first.number)
        sides.append([episode(scoring.rollouts, number, IN_THE_PAGE) for number in numbers[:MOST_SAMPLES]])
    return sides
