"""The results of evals as a table for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from aitrain.runs.eval_result import EvalResult
from aitrain.runs.held_out import DECODINGS, interval_text
from aitrain.ui.escape_controls import escape_controls


def eval_table(results: Sequence[EvalResult]) -> Text:
    """One line for each model: scores with 95% intervals, pass@K, solved cases, tokens of an answer, failures."""
    columns = [name for name in ("sampled", "greedy") if any(result.scores.get(name) for result in results)]
    tries = sorted({int(name) for result in results for name in result.pass_at} - {1})[-1:]
    has_solved = any(result.solved for result in results) and any(result.samples > 1 for result in results)
    head = ["model", *columns, *(f"pass@{count}" for count in tries), *(["solved"] if has_solved else []), "tokens"]
    lines = [[*head, "failed"]]
    for name, result in zip(_names(results), results, strict=True):
        intervals = [interval_text(result.scores.get(name), False) for name in columns]
        intervals += [interval_text(result.pass_at.get(str(count)), False) for count in tries]
        solved = [_share(result.solved.get("sampled"))] if has_solved else []
        lengths = [f"{length['mean']:.1f}" for length in result.lengths.values()]
        failed = str(sum(result.failures.values()))
        lines.append([name, *intervals, *solved, "/".join(lengths), failed])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head_line, *rest = (
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
    return Text.assemble((head_line, "bold"), *(f"\n{line}" for line in rest))


def remarks(results: Sequence[EvalResult]) -> Iterator[str]:
    """What a reader of the table should know, one sentence each."""
    first = results[0]
    samples = f", {first.samples} samples each" if first.samples > 1 else ""
    yield f"{first.environment}: {first.cases} cases{samples}, seed {first.seed}; scores with 95% intervals"
    for label, result in zip(_names(results), results, strict=True):
        for row in [row for row in result.scores if row not in DECODINGS]:  # of one environment of several
            yield f"{label}, {escape_controls(row)}: {interval_text(result.scores[row], False)}"
        for decoding in result.scores:
            if details := ", ".join(_details(result, decoding)):
                yield f"{label}, {decoding}: {details}"
        if result.failures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in result.failures.items())
            yield f"{label}: the environment failed on {sum(result.failures.values())} episodes, left out: {kinds}"
        if result.unscored:
            yield f"{label}: {result.unscored} episodes have no score (None)"
        if result.dropped:
            yield f"{label}: {result.dropped} episodes dropped, as their prompt leaves no room for an answer"
        if result.overlap:
            yield f"{label}: {result.overlap} of {result.cases} cases were trained on, or chose its step"


def _names(results: Sequence[EvalResult]) -> list[str]:
    """The models' names, as they were given where two have the same label."""
    labels = Counter(result.model["label"] for result in results)
    return [
        escape_controls(result.model["label" if labels[result.model["label"]] == 1 else "given"]) for result in results
    ]


def _details(result: EvalResult, decoding: str) -> Iterator[str]:
    """The environment's metrics, and the share of episodes that a limit ended."""
    for name, mean in result.metrics.get(decoding, {}).items():
        yield f"{escape_controls(name)} {mean:.3f}"
    stops = result.stops.get(decoding, {})
    for limit in ("max_tokens", "max_turns", "truncated"):
        if limit in stops:
            yield f"{_share(stops[limit] / sum(stops.values()))} ended by {limit}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
