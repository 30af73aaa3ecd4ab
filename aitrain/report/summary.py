"""A run at a glance: what was run, on what, what came of it, and its curves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from aitrain.config import TrainConfig
from aitrain.privacy import without_secrets
from aitrain.report.intervals import Interval, of_change, of_mean
from aitrain.report.rollouts import Entry, Rollouts, finite, parse, whole_lines
from aitrain.run_folder import RunFolder

POINTS = 1_000
"""Most points of a curve; of a longer run, neighbouring steps are averaged."""
DECODINGS = ("sampled", "greedy")

Values = dict[str, Any]


def summary(folder: Path, rollouts: Rollouts | None) -> Values:
    """All that a page shows above the cases and rollouts, in JSON's own types.

    Without rollouts, as they take a while to read, scores are result.json's and have no intervals.
    """
    run = RunFolder(folder)
    result, status = read_object(run.result), read_object(run.status)
    lines = list(metric_lines(run.metrics))
    return {
        "name": folder.name,
        "status": _text(status.get("status")) or _text(result.get("status")) or "unknown",
        "step": finite(status.get("step")) or _last_step(lines),
        "heartbeat": finite(status.get("heartbeat")),
        "result": {name: result.get(name) for name in ("steps", "seconds", "eval_cases", "train_cases")},
        "environment": read_object(run.environment),
        "knobs": knob_rows(run.config),
        "curves": curves(lines),
        "scores": scores(rollouts.entries) if rollouts else _recorded_scores(result),
        "held_out": held_out_curve(rollouts.entries) if rollouts else _recorded_curve(lines, result),
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


def knob_rows(path: Path) -> list[Values]:
    """The run's knobs as config.yaml has them, with their defaults, in the order of the config."""
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, yaml.YAMLError):
        return []
    if not isinstance(given, dict):
        return []
    fields = TrainConfig.model_fields
    names = [*(name for name in fields if name in given), *(name for name in given if name not in fields)]
    return [_knob_row(str(name), without_secrets(given[name])) for name in names]


def _knob_row(name: str, value: Any) -> Values:
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


def scores(entries: Iterable[Entry]) -> Values:
    """`{"sampled": {"before": interval, "after": interval, "change": interval}, "greedy": ...}`."""
    by_case: dict[str, dict[str, list[float]]] = {}
    for entry in entries:
        if entry.when.startswith(("before", "after")) and entry.score is not None:
            by_case.setdefault(entry.when, {}).setdefault(entry.case, []).append(entry.score)
    means = {when: {case: sum(some) / len(some) for case, some in cases.items()} for when, cases in by_case.items()}
    return {decoding: _before_and_after(means, decoding) for decoding in DECODINGS}


def _before_and_after(means: Mapping[str, Mapping[str, float]], decoding: str) -> Values:
    before, after = means.get(f"before_{decoding}", {}), means.get(f"after_{decoding}", {})
    return {
        "before": _plain(of_mean(before.values())),
        "after": _plain(of_mean(after.values())),
        "change": _plain(of_change(before, after)),
    }


def _plain(interval: Interval | None) -> Values | None:
    return asdict(interval) if interval else None


def _recorded_scores(result: Values) -> Values:
    names = {"sampled": "score", "greedy": "greedy"}
    return {
        decoding: {when: _bare(result.get(f"{name}_{when}")) for when in ("before", "after")} | {"change": None}
        for decoding, name in names.items()
    }


def _bare(value: Any) -> Values | None:
    mean = finite(value)
    return None if mean is None else {"mean": mean, "low": None, "high": None, "count": None}


def held_out_curve(entries: Iterable[Entry]) -> list[Values]:
    """`{"step", "sampled": interval, "greedy": interval}` for each scoring of the held-out cases, in their order."""
    by_time: dict[tuple[int, bool], dict[str, list[float]]] = {}
    for entry in entries:
        if entry.when and entry.score is not None:
            time = entry.step, entry.when.startswith("after")
            by_time.setdefault(time, {}).setdefault(entry.when.rpartition("_")[2], []).append(entry.score)
    return [
        {"step": time[0], **{decoding: _plain(of_mean(some.get(decoding, []))) for decoding in DECODINGS}}
        for time, some in sorted(by_time.items())
    ]


def _recorded_curve(lines: Iterable[Values], result: Values) -> list[Values]:
    points = [
        {"step": line["step"], "sampled": _bare(line["eval_score"]), "greedy": _bare(line.get("eval_greedy"))}
        for line in lines
        if "eval_score" in line and finite(line.get("step")) is not None
    ]
    ends = _recorded_scores(result)
    for place, when, step in ((0, "before", 0), (len(points) + 1, "after", result.get("steps"))):
        if any(ends[decoding][when] for decoding in DECODINGS) and finite(step) is not None:
            points.insert(place, {"step": step, **{decoding: ends[decoding][when] for decoding in DECODINGS}})
    return points


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
