"""A run at a glance: what was run, on what, what came of it, and its curves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from aitrain.options.train import TrainConfig
from aitrain.privacy import without_secrets
from aitrain.report.held_out import (
    DECODINGS,
    Scoring,
    as_values,
    before_and_after,
    bounds_of,
    by_case,
    case_means,
)
from aitrain.report.intervals import Bounds, of_mean
from aitrain.report.rollouts import Entry, Rollouts, finite, parse, whole_lines
from aitrain.run_folder import RunFolder

POINTS = 1_000
"""Most points of a curve; of a longer run, neighbouring steps are averaged."""

RESULTS = ("steps", "seconds", "eval_cases", "eval_samples", "eval_overlap", "train_cases")
"""What of result.json a page shows as it is."""

Values = dict[str, Any]


def summary(folder: Path, rollouts: Rollouts | None) -> Values:
    """All that a page shows above the cases and rollouts, in JSON's own types.

    Without rollouts, as they take a while to read, the curve of held-out scores has no intervals.
    """
    run = RunFolder(folder)
    result, status = read_object(run.result), read_object(run.status)
    lines = list(metric_lines(run.metrics))
    return {
        "name": folder.name,
        "status": _text(status.get("status")) or _text(result.get("status")) or "unknown",
        "step": finite(status.get("step")) or _last_step(lines),
        "heartbeat": finite(status.get("heartbeat")),
        "result": {name: result.get(name) for name in RESULTS},
        "environment": read_object(run.environment),
        "options": option_rows(run.config),
        "curves": curves(lines),
        "scores": scores(run, rollouts),
        "selection": _selection(result),
        "bounds": _bounds(_options(run.config)),
        "held_out": held_out_curve(run, rollouts) if rollouts else _recorded_curve(lines, result),
        "episodes": count(rollouts) if rollouts else None,
    }


# -- files, as they are


def read_object(path: Path) -> Values:
    """A JSON file's object; empty when there is none, or none that can be read."""
    try:
        return parse(path.read_bytes()) or {}
    except OSError:
        return {}


def metric_lines(path: Path) -> Iterable[Values]:
    """The whole lines of metrics.jsonl that are records."""
    try:
        with path.open("rb") as stream:
            yield from (record for line, _, _ in whole_lines(stream) if (record := parse(line)) is not None)
    except OSError:
        return


def _options(path: Path) -> Values:
    """config.yaml, empty where it cannot be read."""
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError):
        return {}
    return given if isinstance(given, dict) else {}


def option_rows(path: Path) -> list[Values]:
    """The run's options as config.yaml has them, with their defaults, in the order of the config."""
    given = _options(path)
    fields = TrainConfig.model_fields
    names = [*(name for name in fields if name in given), *(name for name in given if name not in fields)]
    return [_option_row(str(name), without_secrets(given[name])) for name in names]


def _option_row(name: str, value: Any) -> Values:
    field = TrainConfig.model_fields.get(name)
    default = field.get_default(call_default_factory=True) if field else None
    return {"name": name, "value": _shown(value), "default": _shown(default), "is_default": value == default}


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


# -- curves


def curves(lines: Iterable[Values]) -> Values:
    """`{"step": [...], "series": {name: [...]}}` of the lines that are training steps."""
    steps = [line for line in lines if "eval_score" not in line and finite(line.get("step")) is not None]
    names = {name: None for line in steps for name in line if name != "step"}
    buckets = (
        [steps[start : start + size] for start in range(0, len(steps), size)]
        if (size := -(-len(steps) // POINTS))
        else []
    )
    series = {name: [_mean(line.get(name) for line in bucket) for bucket in buckets] for name in names}
    return {
        "step": [bucket[-1]["step"] for bucket in buckets],
        "series": {name: values for name, values in series.items() if any(value is not None for value in values)},
    }


def _mean(values: Iterable[Any]) -> float | None:
    numbers = [value for raw in values if (value := finite(raw)) is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _last_step(lines: list[Values]) -> float | None:
    return max((value for line in lines if (value := finite(line.get("step"))) is not None), default=None)


# -- scores before and after


def scores(run: RunFolder, rollouts: Rollouts | None) -> Values:
    """`{"sampled": {"before": interval, "after": interval, "change": interval}, "greedy": ...}`, with `pass@K` where
    cases have several samples: result.json's, and those of the rollouts while there is no result."""
    result = read_object(run.result)
    recorded = result.get("scores")
    is_going_on = read_object(run.status).get("status") == "running"
    if isinstance(recorded, dict) and not is_going_on:
        return recorded
    if rollouts is None:
        return _recorded_scores(result)
    options = _options(run.config)
    tries = options.get("eval_samples")
    return before_and_after(_ends(rollouts.entries), _bounds(options), tries if isinstance(tries, int) else 1)


def _ends(entries: Iterable[Entry]) -> dict[str, Scoring]:
    """The scorings before and after; before, of the cases that were played after as well, where there is an after."""
    ends = [entry for entry in entries if entry.when.startswith(("before", "after"))]
    played = {entry.case for entry in ends if entry.when.startswith("after")} or {entry.case for entry in ends}
    return {
        when: by_case((e.case, e.score) for e in ends if e.when == when and e.score is not None and e.case in played)
        for when in {entry.when for entry in ends}
    }


def _bounds(options: Values) -> Bounds | None:
    return bounds_of(options.get("rl_score_range"))


def _selection(result: Values) -> Values | None:
    """What --save-best chose, and by which score, of how many."""
    score = finite(result.get("selection_score"))
    if score is None:
        return None
    return {"score": score, "step": result.get("model_step"), "scorings": result.get("selection_scorings")}


def _recorded_scores(result: Values) -> Values:
    names = {"sampled": "score", "greedy": "greedy"}
    return {
        decoding: {when: _bare(result.get(f"{name}_{when}")) for when in ("before", "after")} | {"change": None}
        for decoding, name in names.items()
    }


def _bare(value: Any) -> Values | None:
    mean = finite(value)
    return None if mean is None else {"mean": mean, "low": None, "high": None, "count": None}


def held_out_curve(run: RunFolder, rollouts: Rollouts) -> list[Values]:
    """`{"step", "sampled": interval, "greedy": interval}` for each policy of which held-out cases were scored, by its
    step. What the policy that is model/ came to at the end stands in for earlier scorings of the same step."""
    bounds = _bounds(_options(run.config))
    points: dict[int, dict[str, list[Entry]]] = {}
    for entry in rollouts.entries:
        if entry.when:
            points.setdefault(entry.policy_step, {}).setdefault(entry.when, []).append(entry)
    return [{"step": step, **_point(scorings, bounds)} for step, scorings in sorted(points.items())]


def _point(scorings: Mapping[str, list[Entry]], bounds: Bounds | None) -> Values:
    values: Values = {}
    for decoding in DECODINGS:
        names = sorted(
            (name for name in scorings if name.endswith(decoding)), key=lambda name: name.startswith("after")
        )
        entries = scorings[names[-1]] if names else []
        scored = by_case((entry.case, entry.score) for entry in entries if entry.score is not None)
        values[decoding] = as_values(of_mean(case_means(scored).values(), bounds))
    return values


def _recorded_curve(lines: Iterable[Values], result: Values) -> list[Values]:
    points = [
        {"step": line["step"], "sampled": _bare(line["eval_score"]), "greedy": _bare(line.get("eval_greedy"))}
        for line in lines
        if "eval_score" in line and finite(line.get("step")) is not None
    ]
    ends = _recorded_scores(result)
    for when, step in (("before", 0), ("after", result.get("model_step", result.get("steps")))):
        if any(ends[decoding][when] for decoding in DECODINGS) and finite(step) is not None:
            points = [point for point in points if point["step"] != step]
            points.append({"step": step, **{decoding: ends[decoding][when] for decoding in DECODINGS}})
    return sorted(points, key=lambda point: point["step"])


# -- episodes


@dataclass(frozen=True)
class Counted:
    """How many episodes there are, of which kind."""

    all: int
    held_out: int
    failed: int
    damaged: int
    failures: dict[str, int]
    stops: dict[str, int]
    whens: list[str]
    steps: list[int]
    """Those that have episodes of training, ascending."""


def count(rollouts: Rollouts) -> Values:
    """See Counted."""
    entries = rollouts.entries
    failures: dict[str, int] = {}
    stops: dict[str, int] = {}
    for entry in entries:
        stops[entry.stop] = stops.get(entry.stop, 0) + 1
        if entry.failure:
            failures[entry.failure] = failures.get(entry.failure, 0) + 1
    whens = list(dict.fromkeys(entry.when for entry in entries if entry.when))
    steps = sorted({entry.step for entry in entries if not entry.when})
    held_out = sum(entry.is_held_out for entry in entries)
    counted = Counted(len(entries), held_out, sum(failures.values()), rollouts.damaged, failures, stops, whens, steps)
    return asdict(counted)
