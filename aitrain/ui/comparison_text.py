"""A comparison of two models as text for a terminal, with control characters escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from aitrain.redaction import redact
from aitrain.runs.comparison import CasePair, ComparedRow, Comparison, Outcome, telling_samples
from aitrain.runs.held_out import interval_text
from aitrain.runs.verdict import VERDICT_STYLES, VERDICT_WORDS
from aitrain.ui.dashboard import number
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.terminal import text_table
from aitrain.ui.transcript import BAD, GOOD, MIDDLE, Indented, messages_text, score_text

NARROWEST = 80
"""Columns of a terminal from which on two transcripts are shown side by side."""
LONGEST_TEXT = 2_000
"""Maximum characters of an answer; the page has more."""
SHOWN_OUTCOMES: tuple[Outcome, ...] = ("lost", "won")


def comparison_texts(
    comparisons: Sequence[Comparison], most_cases: int = 2, detect: float | None = None
) -> Iterator[RenderableType]:
    """The comparisons, each from its verdict to the transcripts of the `most_cases` that B lost and won most clearly.
    `detect`: the difference that the number of cases is computed for, unless it is the measured one."""
    if len(comparisons) > 1:
        heads = ("model", comparisons[0].a.label, "itself", "change", f"p, corrected for {len(comparisons)}")
        yield row_table([replace(one.main, name=one.b.label) for one in comparisons], heads)
        yield Text()
    for comparison in comparisons:
        a, b, verdict = comparison.a, comparison.b, comparison.verdict
        yield Text.assemble(
            (escape_controls(f"{b.label} compared with {a.label}: "), "bold"),
            (VERDICT_WORDS[verdict], f"bold {VERDICT_STYLES[verdict]}"),
        )
        for scoring in (a, b):
            yield Text(escape_controls(f"{scoring.label}: {scoring.model}  {scoring.folder}"), "dim")
        yield Text()
        yield row_table(comparison.rows, ("held-out", a.label, b.label, "change", "p"))
        yield Text()
        yield _counts(comparison)
        for sentence in filter(None, (comparison.format_sentence(), comparison.power_sentence(detect))):
            yield Text(escape_controls(sentence))
        for note in comparison.notes:
            yield Text(f"! {escape_controls(redact(note))}", style=MIDDLE)
        for outcome in SHOWN_OUTCOMES:
            cases = comparison.cases(outcome)
            for place, pair in enumerate(cases[:most_cases], start=1):
                yield Text()
                yield from case_text(comparison, pair, f"{outcome} {place} of {len(cases)}")
        yield Text()


def row_table(rows: Sequence[ComparedRow], heads: Sequence[str]) -> Text:
    """The rows with intervals and p-values."""
    lines: list[list[str | Text]] = [[Text(escape_controls(head), "bold") for head in (*heads, "")]]
    for row in rows:
        verdict = Text(VERDICT_WORDS[row.verdict], VERDICT_STYLES[row.verdict]) if row.verdict else Text()
        means = [interval_text(row.a, False), interval_text(row.b, False), interval_text(row.change, True)]
        lines.append([escape_controls(row.name), *means, p_text(row.change.get("p_value") or 0.0), verdict])
    return text_table(lines)


def p_text(p_value: float) -> str:
    """`0.034`, or `< 0.001`."""
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def _counts(comparison: Comparison) -> Text:
    counts = {outcome: len(comparison.cases(outcome)) for outcome in ("won", "lost", "equal", "unscored")}
    text = Text(f"{len(comparison.pairs)} cases, {comparison.decoding}: ")
    text.append(f"{counts['won']} won", GOOD if counts["won"] else "").append(", ")
    text.append(f"{counts['lost']} lost", BAD if counts["lost"] else "").append(f", {counts['equal']} equal")
    return text.append(f", {counts['unscored']} without a score in one of them" if counts["unscored"] else "")


# -- cases


def case_text(comparison: Comparison, pair: CasePair, title: str) -> Iterator[RenderableType]:
    """One case: its prompt, and what each model said, in the episodes that show the difference best."""
    a, b = comparison.a, comparison.b
    names = pair.a.case if pair.a.case == pair.b.case else f"{pair.a.case} in {a.label}, {pair.b.case} in {b.label}"
    scores = f"{number(pair.score_a)} -> {number(pair.score_b)}"
    yield Text.assemble((f"{title}  ", "bold"), escape_controls(f"{scores}  case {names}"))
    samples = telling_samples(comparison, pair)
    records = [scoring.record(sample) for scoring, sample in zip((a, b), samples, strict=True)]
    yield from messages_text(records[0].transcript()[0])
    sides = []
    for scoring, sample, case, record in zip((a, b), samples, (pair.a, pair.b), records, strict=True):
        count = len(case.samples[comparison.decoding])
        of = f", one of {count} samples" if count > 1 else ""
        head = Text.assemble((escape_controls(scoring.label), "bold"), "  ", score_text(sample.score), (of, "dim"))
        sides.append((head, [_cut(message.text) for message in messages_text(record.transcript()[1])]))
    yield SideBySide(sides)


def _cut(text: Text) -> Text:
    if len(text) <= LONGEST_TEXT:
        return text
    return text[:LONGEST_TEXT].append(f"… {len(text) - LONGEST_TEXT:,} more characters", "dim")


@dataclass(frozen=True)
class SideBySide:
    """What two models said, in two columns of a wide terminal, else one after the other."""

    sides: Sequence[tuple[Text, Sequence[Text]]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.is_terminal and options.max_width >= NARROWEST:
            table = Table.grid(padding=(0, 3), expand=True)
            for _ in self.sides:
                table.add_column(ratio=1, overflow="fold")
            table.add_row(*(Group(head, *said) for head, said in self.sides))
            yield Padding(table, (0, 0, 0, 2))
            return
        for head, said in self.sides:
            yield Text("  ") + head
            yield from map(Indented, said)
