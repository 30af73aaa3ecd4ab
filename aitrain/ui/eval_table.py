"""The results of evals as a table for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.text import Text

from aitrain.runs.eval_result import EvalResult
from aitrain.runs.held_out import DECODINGS, interval_text
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.terminal import text_table


def eval_table(results: Sequence[EvalResult]) -> Text:
    """One line for each model: scores with 95% intervals, pass@K, solved cases, tokens of an answer, failures."""
    columns = [name for name in DECODINGS if any(result.scores.get(name) for result in results)]
    tries = sorted({int(name) for result in results for name in result.pass_at} - {1})[-1:]
    has_solved = any(result.solved for result in results) and any(result.samples > 1 for result in results)
    head = ["model", *columns, *(f"pass@{count}" for count in tries), *(["solved"] if has_solved else [])]
    lines: list[list[str | Text]] = [[Text(title, "bold") for title in (*head, "tokens", "failed")]]
    for name, result in zip(_names(results), results, strict=True):
        intervals = [*(result.scores.get(name) for name in columns), *(result.pass_at.get(str(n)) for n in tries)]
        lines.append([name, *(interval_text(interval, False) for interval in intervals)])
        if has_solved:
            lines[-1].append(f"{result.solved['sampled']:.0%}" if "sampled" in result.solved else "-")
        lengths = "/".join(f"{length['mean']:.1f}" for length in result.lengths.values())
        lines[-1] += [lengths, str(sum(result.failures.values()))]
    return text_table(lines)


def remarks(results: Sequence[EvalResult]) -> Iterator[str]:
    """What a reader of the table should know, one sentence each."""
    first = results[0]
    samples = f", {first.samples} samples each" if first.samples > 1 else ""
    yield f"{first.environment}: {first.cases} cases{samples}, seed {first.seed}; scores with 95% intervals"
    for label, result in zip(_names(results), results, strict=True):
        for row in [row for row in result.scores if row not in DECODINGS]:  # of one environment of several
            yield f"{label}, {escape_controls(row)}: {interval_text(result.scores[row], False)}"
        for decoding in result.scores:
            metrics = result.metrics.get(decoding, {}).items()
            details = [f"{escape_controls(name)} {mean:.3f}" for name, mean in metrics]
            stops = result.stops.get(decoding, {})
            limits = [limit for limit in ("max_tokens", "max_turns", "truncated") if limit in stops]
            details += [f"{stops[limit] / sum(stops.values()):.0%} ended by {limit}" for limit in limits]
            if details:
                yield f"{label}, {decoding}: {', '.join(details)}"
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
