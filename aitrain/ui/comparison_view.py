"""A comparison of two models as text for a terminal, and as one HTML file that needs a script for its filters only.
Control characters of models are escaped."""

import time
from collections.abc import Iterator, Sequence

from rich.text import Text

from aitrain.packages import public_base
from aitrain.redaction import redact
from aitrain.runs.comparison import CasePair, Comparison, Outcome, telling_samples
from aitrain.runs.held_out import (
    VERDICT_STYLES,
    VERDICT_WORDS,
    ScoreTable,
    interval_text,
    table_texts,
    verdict_of,
)
from aitrain.runs.json_values import JsonObject
from aitrain.ui.dashboard import number
from aitrain.ui.episodes import episode
from aitrain.ui.output import escape_controls
from aitrain.ui.page import rendered
from aitrain.ui.terminal import text_table
from aitrain.ui.transcript import messages_text

STYLES = ("page.css", "comparison.css")
SCRIPTS = ("dom.js", "theme.js", "comparison.js")
MOST_CASES: dict[Outcome, int] = {"lost": 40, "won": 40, "equal": 10}
"""Maximum number of cases with transcripts, of each outcome."""
MOST_ROWS = 5_000
"""Maximum number of cases that are listed."""


def comparison_texts(comparisons: Sequence[Comparison], most_cases: int = 2) -> Iterator[Text]:
    """The comparisons, each from its verdict to the transcripts of the `most_cases` that B lost and won most
    clearly."""
    if len(comparisons) > 1:
        heads = ("model", comparisons[0].a.label, "itself", "change", f"p, corrected for {len(comparisons)}")
        yield row_table({one.b.label: one.rows[one.decoding] for one in comparisons}, heads)
        yield Text()
    for comparison in comparisons:
        a, b, verdict = comparison.a, comparison.b, comparison.verdict
        yield Text.assemble(
            (escape_controls(f"{b.label} compared with {a.label}: "), "bold"),
            (VERDICT_WORDS[verdict], f"bold {VERDICT_STYLES[verdict]}"),
        )
        for scoring in (a, b):
            yield Text(escape_controls(f"{scoring.label}: {public_base(scoring.model)}  {scoring.folder}"), "dim")
        yield Text()
        yield row_table(comparison.rows, ("held-out", a.label, b.label, "change", "p"))
        yield Text()
        shown = ", ".join(f"{count} {name}" for name, count in comparison.counts.items())
        yield Text(f"{len(comparison.pairs)} cases, {comparison.decoding}: {shown}")
        for sentence in filter(None, (comparison.format_sentence(), comparison.power_sentence())):
            yield Text(escape_controls(sentence))
        for note in comparison.notes:
            yield Text(f"! {escape_controls(redact(note))}", style="yellow")
        for outcome, cases in {"lost": comparison.cases("lost"), "won": comparison.cases("won")}.items():
            for place, pair in enumerate(cases[:most_cases], start=1):
                yield Text()
                yield from case_text(comparison, pair, f"{outcome} {place} of {len(cases)}")
        yield Text()


def row_table(rows: ScoreTable, heads: Sequence[str]) -> Text:
    """The rows with intervals and p-values."""
    lines: list[list[str | Text]] = [[Text(escape_controls(head), "bold") for head in (*heads, "")]]
    for name, *texts in table_texts(rows):
        change = rows[name]["change"]
        if change and (verdict := verdict_of(change)):
            said = Text(VERDICT_WORDS[verdict], VERDICT_STYLES[verdict])
            lines.append([escape_controls(name), *texts, p_text(change.get("p_value") or 0.0), said])
    return text_table(lines)


def p_text(p_value: float) -> str:
    """`0.034`, or `< 0.001`."""
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


# -- cases


def case_text(comparison: Comparison, pair: CasePair, title: str) -> Iterator[Text]:
    """One case: its prompt, and what each model said, in the episodes that show the difference best."""
    a, b = comparison.a, comparison.b
    scores = f"{number(pair.score_a)} -> {number(pair.score_b)}"
    yield Text.assemble((f"{title}  ", "bold"), escape_controls(f"{scores}  case {pair.a.case} of {a.label}"))
    for scoring, sample in zip((a, b), telling_samples(comparison, pair), strict=True):
        asked, said = scoring.rollouts.record(sample).transcript()
        if scoring is a:
            yield from messages_text(asked)
        yield Text.assemble("  ", (escape_controls(scoring.label), "bold"), f"  score {number(sample.score)}")
        yield from messages_text(said)


# -- the page


def page_of_comparisons(comparisons: Sequence[Comparison]) -> str:
    """The page of some models that are compared with the same one."""
    return rendered(
        "comparison.html",
        STYLES,
        SCRIPTS,
        title=f"{comparisons[0].b.label} compared with {comparisons[0].a.label}",
        views=list(map(_view, comparisons)),
        written=time.strftime("%Y-%m-%d %H:%M"),
        words=VERDICT_WORDS,
        outcomes=MOST_CASES,
        interval=interval_text,
        verdict_of=verdict_of,
        p_text=p_text,
        shown=escape_controls,
        short_name=public_base,
    )


def _view(comparison: Comparison) -> JsonObject:
    told = {id(pair) for outcome, most in MOST_CASES.items() for pair in comparison.cases(outcome)[:most]}
    changes = [change for row in comparison.rows.values() if (change := row["change"])]
    limits = [abs(limit) for change in changes for limit in (change["low"], change["high"], change["mean"]) if limit]
    return {
        "c": comparison,
        "notes": [redact(note) for note in comparison.notes],
        "reach": max(limits, default=1.0),
        "cases": [
            (pair, _episodes(comparison, pair) if id(pair) in told else []) for pair in comparison.pairs[:MOST_ROWS]
        ],
    }


def _episodes(comparison: Comparison, pair: CasePair) -> list[JsonObject]:
    """The episode of a case by each model that shows the difference best."""
    sides = zip((comparison.a, comparison.b), telling_samples(comparison, pair), strict=True)
    return [episode(scoring.rollouts, sample) for scoring, sample in sides]
