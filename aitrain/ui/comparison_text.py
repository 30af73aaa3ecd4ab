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
from aitrain.runs.recorded_scoring import RecordedSample, RecordedScoring
from aitrain.runs.rollout_record import TranscriptMessage
from aitrain.runs.verdict import VERDICT_STYLES, VERDICT_WORDS
from aitrain.ui.dashboard import number
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.transcript import BAD, GOOD, MIDDLE, Indented, messages_text

NARROWEST = 80
"""Columns of a terminal from which on two transcripts are shown side by side."""
LONGEST_TEXT = 2_000
"""Maximum characters of an answer; the page has more."""
SHOWN_OUTCOMES: tuple[Outcome, ...] = ("lost", "won")


@dataclass(frozen=True)
class ShownParts:
    """What of a comparison is shown, and how wide."""

    most_cases: int = 2
    """Lost cases and won cases with transcripts, of each kind."""
    detect: float | None = None
    """Difference that the number of cases is computed for; None for the measured one."""
    width: int | None = None
    """Columns of the terminal; None for lines of any length."""


def comparison_texts(comparisons: Sequence[Comparison], parts: ShownParts) -> Iterator[RenderableType]:
    """The comparisons, each from its verdict to the transcripts of the cases that B lost and won most clearly."""
    if len(comparisons) > 1:
        heads = ("model", comparisons[0].a.label, "itself", "change", f"p, corrected for {len(comparisons)}")
        yield row_table([replace(one.main, name=one.b.label) for one in comparisons], heads, parts.width)
        yield Text()
    for comparison in comparisons:
        yield from _comparison(comparison, parts)
        yield Text()


def _comparison(comparison: Comparison, parts: ShownParts) -> Iterator[RenderableType]:
    yield _heading(comparison)
    yield Text()
    yield row_table(comparison.rows, ("held-out", comparison.a.label, comparison.b.label, "change", "p"), parts.width)
    yield Text()
    yield _counts(comparison)
    for sentence in (comparison.format_sentence(), comparison.power_sentence(parts.detect)):
        if sentence:
            yield Text(escape_controls(sentence))
    for note in comparison.notes:
        yield Text(f"! {escape_controls(redact(note))}", style=MIDDLE)
    for outcome in SHOWN_OUTCOMES:
        cases = comparison.cases(outcome)
        for place, pair in enumerate(cases[: parts.most_cases], start=1):
            yield Text()
            yield from case_text(comparison, pair, f"{outcome} {place} of {len(cases)}")


def _heading(comparison: Comparison) -> Text:
    verdict, a, b = comparison.verdict, comparison.a, comparison.b
    text = Text.assemble(
        (escape_controls(f"{b.label} compared with {a.label}: "), "bold"),
        (VERDICT_WORDS[verdict], f"bold {VERDICT_STYLES[verdict]}"),
    )
    for scoring in (a, b):
        text.append(f"\n{escape_controls(f'{scoring.label}: {scoring.model}  {scoring.folder}')}", "dim")
    return text


def row_table(rows: Sequence[ComparedRow], heads: Sequence[str], width: int | None = None) -> Text:
    """The rows with intervals and p-values; the means without intervals where a line would be longer than `width`."""
    means: Sequence[tuple[str, str]] = [(interval_text(row.a, False), interval_text(row.b, False)) for row in rows]
    text = _table(rows, heads, means)
    if width is not None and max(map(len, text.plain.split("\n"))) > width:
        text = _table(rows, heads, [(number(row.a["mean"]), number(row.b["mean"])) for row in rows])
    return text


def _table(rows: Sequence[ComparedRow], heads: Sequence[str], means: Sequence[tuple[str, str]]) -> Text:
    lines: list[tuple[str, ...]] = [tuple(map(escape_controls, heads))]
    for row, pair in zip(rows, means, strict=True):
        p_value = p_text(row.change.get("p_value") or 0.0)
        lines.append((escape_controls(row.name), *pair, interval_text(row.change, True), p_value))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = Text()
    for line, verdict in zip(lines, (None, *(row.verdict for row in rows)), strict=True):
        cells = "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        text.append(f"{cells}  " if verdict else f"{cells}\n", "" if verdict else "bold")
        if verdict:
            text.append(f"{VERDICT_WORDS[verdict]}\n", VERDICT_STYLES[verdict])
    text.rstrip()
    return text


def p_text(p_value: float) -> str:
    """`0.034`, or `< 0.001`."""
    return "< 0.001" if p_value < 0.001 else f"{p_value:.3f}"


def _counts(comparison: Comparison) -> Text:
    counts = {outcome: len(comparison.cases(outcome)) for outcome in ("won", "lost", "equal", "unscored")}
    text = Text.assemble(
        f"{len(comparison.pairs)} cases, {comparison.decoding}: ",
        (f"{counts['won']} won", GOOD if counts["won"] else ""),
        ", ",
        (f"{counts['lost']} lost", BAD if counts["lost"] else ""),
        f", {counts['equal']} equal",
    )
    return text.append(f", {counts['unscored']} without a score in one of them" if counts["unscored"] else "")


# -- cases


def case_text(comparison: Comparison, pair: CasePair, title: str) -> Iterator[RenderableType]:
    """One case: its prompt, and what each model said, in the episodes that show the difference best."""
    a, b = comparison.a, comparison.b
    numbers = pair.a.case if pair.a.case == pair.b.case else f"{pair.a.case} in {a.label}, {pair.b.case} in {b.label}"
    scores = f"{number(pair.score_a)} -> {number(pair.score_b)}"
    yield Text.assemble((f"{title}  ", "bold"), escape_controls(f"{scores}  case {numbers}"))
    samples = telling_samples(comparison, pair)
    records = [scoring.record(sample) for scoring, sample in zip((a, b), samples, strict=True)]
    yield from messages_text(records[0].transcript()[0])
    yield SideBySide(
        tuple(
            _side(scoring, sample, len(case.samples[comparison.decoding]), record.transcript()[1])
            for scoring, sample, case, record in zip((a, b), samples, (pair.a, pair.b), records, strict=True)
        )
    )


def _side(
    scoring: RecordedScoring, sample: RecordedSample, samples: int, said: Sequence[TranscriptMessage]
) -> tuple[Text, Sequence[Text]]:
    score = sample.score
    colour = "dim" if score is None else GOOD if score > 0.8 else BAD if score < 0.2 else MIDDLE
    of = f", one of {samples} samples" if samples > 1 else ""
    head = Text.assemble(
        (escape_controls(scoring.label), "bold"), "  ", (f"score {number(score)}", colour), (of, "dim")
    )
    return head, [_cut(message.text) for message in messages_text(said)]


def _cut(text: Text) -> Text:
    if len(text) <= LONGEST_TEXT:
        return text
    return text[:LONGEST_TEXT].append(f"… {len(text) - LONGEST_TEXT:,} more characters", "dim")


@dataclass(frozen=True)
class SideBySide:
    """What two models said, in two columns of a wide terminal, else one after the other."""

    sides: tuple[tuple[Text, Sequence[Text]], ...]

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
