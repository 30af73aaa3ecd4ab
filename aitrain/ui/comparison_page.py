"""The page of a comparison: one file with everything in it, as report.html."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from aitrain.redaction import redact
from aitrain.runs.comparison import CasePair, Comparison, Outcome, compare_all, telling_samples
from aitrain.runs.json_values import JsonObject
from aitrain.runs.recorded_scoring import RecordedCase, RecordedScoring, read_scorings
from aitrain.ui.episodes import Limit, episode
from aitrain.ui.page import self_contained

STYLES = ("page.css", "comparison.css")
SCRIPTS = ("dom.js", "theme.js", "transcript.js", "comparison.js")
MOST_CASES: dict[Outcome, int] = {"lost": 60, "won": 60, "equal": 20, "unscored": 20}
"""Maximum number of cases with transcripts, of each outcome."""
MOST_ROWS = 5_000
"""Maximum number of cases that are listed."""
MOST_SAMPLES = 4
IN_THE_PAGE = Limit(text=6_000, first=40, last=10)
ABOUT_THE_CASE = ("asked", "row", "columns", "tools")
"""Fields of an episode that a case's episodes have in common."""


def comparison_page(a: Path, b: Path) -> str:
    """The page of two runs or evals; of the same run twice, its model before training compared with the one after.

    Raises:
        ConfigError: they cannot be compared.
    """
    return page_of_comparisons(compare_all(read_scorings([a] if a.resolve() == b.resolve() else [a, b])))


def page_of_comparisons(comparisons: Sequence[Comparison]) -> str:
    """The page of some models that are compared with the same one."""
    data = {"comparisons": [_view(comparison) for comparison in comparisons], "written": time.time()}
    return self_contained(data, STYLES, SCRIPTS)


def _view(comparison: Comparison) -> JsonObject:
    with_transcripts = {
        id(pair)
        for outcome, most in MOST_CASES.items()
        for pair in comparison.cases(outcome)[:most]
        if pair.a.samples[comparison.decoding] and pair.b.samples[comparison.decoding]  # else an eval was interrupted
    }
    ranked = sorted(comparison.pairs, key=lambda pair: -abs(pair.difference or 0.0))[:MOST_ROWS]
    return {
        **comparison.to_json(),
        "format": comparison.format_sentence(),
        "power": comparison.power_sentence(),
        "notes": [redact(note) for note in comparison.notes],
        "bounds": comparison.a.bounds,
        "folders": [str(comparison.a.folder), str(comparison.b.folder)],
        "cases": [_case(comparison, pair, id(pair) in with_transcripts) for pair in ranked],
    }


def _case(comparison: Comparison, pair: CasePair, has_transcripts: bool) -> JsonObject:
    shown: JsonObject = {
        "prompt": pair.a.prompt,
        "outcome": pair.outcome,
        "names": [pair.a.case, pair.b.case],
        "scores": [pair.score_a, pair.score_b],
    }
    if has_transcripts:
        telling = [sample.number for sample in telling_samples(comparison, pair)]
        sides = zip((comparison.a, comparison.b), (pair.a, pair.b), telling, strict=True)
        episodes = [_episodes(scoring, case, comparison.decoding, first) for scoring, case, first in sides]
        shown["case"] = {name: episodes[0][0][name] for name in ABOUT_THE_CASE}
        is_same = episodes[0][0]["asked"] == episodes[1][0]["asked"]
        shown["sides"] = [
            [{**one, "asked": [] if is_same else one["asked"], "row": [], "tools": []} for one in side]
            for side in episodes
        ]
        shown["samples"] = [len(case.samples[comparison.decoding]) for case in (pair.a, pair.b)]
    return shown


def _episodes(scoring: RecordedScoring, case: RecordedCase, decoding: str, first: int) -> list[JsonObject]:
    """Some episodes of a case, beginning with the one that shows the difference best."""
    numbers = [sample.number for sample in case.samples[decoding].values()]
    numbers.sort(key=lambda number: number != first)
    return [episode(scoring.rollouts, number, IN_THE_PAGE) for number in numbers[:MOST_SAMPLES]]
