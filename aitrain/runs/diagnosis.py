"""The diagnosis of a run: conditions that keep it from learning, and signs of reward hacking and collapse, found in its
metrics line by line, while it trains or afterwards. Each is reported once in a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field

from aitrain.runs.held_out import bounds_of, recorded_table
from aitrain.runs.json_values import JsonObject, as_int, as_text
from aitrain.runs.level_rules import NEWEST, RunTraits, Values, lasts, level_rules
from aitrain.runs.metrics_line import MetricsLine, read_metrics
from aitrain.runs.run_folder import RunFolder, read_lines, read_object
from aitrain.runs.run_options import read_options
from aitrain.runs.trend_rules import (
    Past,
    TrendRule,
    all_at_the_top,
    held_out_falls,
    longer_without_gain,
    one_component,
    prompt_is_ignored,
)

STRETCH = 40
"""Lines of the shortest stretch over which a trend is looked for; the others are twice as long each, and the whole
run."""


@dataclass(frozen=True)
class RunFinding:
    """A condition that was found: its name in docs/diagnostics.md, the step, and the advice on one line."""

    name: str
    step: int
    text: str


@dataclass
class Diagnosis:
    """Finds conditions in the metrics of one run. Equal lines give equal findings, so a resumed run reads its own
    metrics again."""

    traits: RunTraits = field(default_factory=RunTraits)
    reported: set[str] = field(default_factory=set)
    """Names of the conditions that were reported, which are not looked for any more."""
    first: Values = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    rows: list[Values] = field(default_factory=list)
    scorings: list[MetricsLine] = field(default_factory=list)
    _held: dict[str, list[bool]] = field(default_factory=dict)

    def see(self, line: MetricsLine) -> list[RunFinding]:
        """Add a line of metrics, or a scoring; returns what is found with it."""
        if line.is_scoring:
            later = [one for one in self.scorings if one.step != line.step]
            self.scorings = sorted((*later, line), key=lambda one: one.step)
        else:
            values = {name: value for name, value in line.series.items() if value is not None}
            self.first = {**values, **self.first}
            self.steps.append(line.step)
            self.rows.append(values)
        found = []
        for name, text in (*(() if line.is_scoring else self._in_levels()), *self._in_past(line.is_scoring)):
            if name not in self.reported:
                self.reported.add(name)
                found.append(RunFinding(name, line.step, text))
        return found

    def _in_levels(self) -> Iterator[tuple[str, str]]:
        now = self.rows[-1]
        for rule in level_rules(self.traits):
            held = self._held.setdefault(rule.name, [])
            held.append(rule.is_triggered(now, self.first))
            del held[:-NEWEST]
            if rule.name not in self.reported and lasts(held):
                yield rule.name, rule.advice(now, self.first)

    def _in_past(self, is_scoring: bool) -> Iterator[tuple[str, str]]:
        for name, rule, size in self._looks(is_scoring):
            if name not in self.reported and self.rows:
                past = Past(self.traits, self.steps[-size:], self.rows[-size:], self.scorings)
                if text := rule(past):
                    yield name, text

    def _looks(self, is_scoring: bool) -> Iterator[tuple[str, TrendRule, int]]:
        """The conditions to look for now, each with the number of newest lines."""
        if is_scoring:
            yield "held_out", held_out_falls, len(self.rows)
            return
        yield "top_score", all_at_the_top, len(self.rows)
        for size in self._stretches():
            yield "length", longer_without_gain, size
            yield "component", one_component, size
            yield "prompt_dependence", prompt_is_ignored, size

    def _stretches(self) -> Iterator[int]:
        """Sizes of the stretches to look at after this line: each one four times in its length."""
        size, lines = STRETCH, len(self.rows)
        while size <= lines:
            if lines % (size // 4) == 0:
                yield size
                if 2 * size > lines > size:
                    yield lines
            size *= 2


def traits_of(options: JsonObject) -> RunTraits:
    """What diagnostics must know of options, by their names; those that are missing have their defaults."""
    return RunTraits(
        bounds=bounds_of(options.get("rl_score_range")),
        samples_uniformly=options.get("rl_sampling") in (None, "uniform") and not options.get("custom_sampler"),
        has_several_environments=isinstance(envs := options.get("rl_env"), list) and len(envs) > 1,
        samples_ahead=bool(options.get("rl_ahead")),
        loss_type=as_text(options.get("rl_loss_type")) or "grpo",
    )


def findings_of(folder: RunFolder) -> list[RunFinding]:
    """The findings of a run: those that it recorded, or of a run that recorded none, what its metrics show."""
    if folder.diagnostics.exists():
        return list(recorded_findings(folder))
    diagnosis = Diagnosis(traits_of(read_options(folder.config)))
    return [finding for line in _with_ends(folder) for finding in diagnosis.see(line)]


def recorded_findings(folder: RunFolder) -> Iterator[RunFinding]:
    """The lines of diagnostics.jsonl."""
    for values in read_lines(folder.diagnostics):
        yield RunFinding(as_text(values.get("name")), as_int(values.get("step")) or 0, as_text(values.get("text")))


def finding_line(finding: RunFinding) -> JsonObject:
    """The line of diagnostics.jsonl."""
    return asdict(finding)


def _with_ends(folder: RunFolder) -> Iterator[MetricsLine]:
    """The metrics of a run, with the scorings before and after the training between them."""
    lines: Iterable[MetricsLine] = read_metrics(folder.metrics)
    result = read_object(folder.result)
    row = (recorded_table(result.get("scores")) or {}).get("sampled")
    ends = {when: row[when] for when in ("before", "after")} if row else {}
    if before := ends.get("before"):
        yield MetricsLine(step=0, eval_score=before["mean"], eval_low=before["low"])
    yield from lines
    if after := ends.get("after"):
        yield MetricsLine(step=as_int(result.get("steps")) or 0, eval_score=after["mean"], eval_low=after["low"])
