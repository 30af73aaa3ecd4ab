"""The summary of a run that page, terminal and model card show: status, options, scores, curves, counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import NotRequired, TypeAlias, TypedDict

from aitrain.options.evaluate import EvalConfig
from aitrain.options.train import TrainConfig
from aitrain.redaction import without_secrets
from aitrain.runs.diagnosis import findings_of
from aitrain.runs.held_out import (
    DECODINGS,
    Bounds,
    IntervalValues,
    ScoreRow,
    ScoreTable,
    Scoring,
    by_case,
    interval_of,
    recorded_table,
)
from aitrain.runs.json_values import JsonObject, as_float, as_int, as_object, as_text
from aitrain.runs.metrics_line import MetricsLine, read_metrics
from aitrain.runs.node_info import NodeInfo, read_nodes
from aitrain.runs.rollout_index import IndexEntry, RolloutIndex
from aitrain.runs.run_folder import RunFolder, read_lines, read_object
from aitrain.runs.run_options import read_options
from aitrain.runs.statistics import (
    Mixture,
    bounds_of_mean,
    interval_of_mean,
    named,
    recorded_mixture,
    score_table,
)
from aitrain.runs.verdict import Verdict, verdict_of_scores
from aitrain.ui.next_steps import NextStep, advice, learned_nothing, next_steps
from aitrain.ui.run_state import RunState, run_state

Phases: TypeAlias = dict[str, list[IndexEntry]]
POINTS = 1_000
"""Maximum points of a curve; in a longer run, neighbouring steps are averaged."""
LONGEST_GAP = 4
"""Maximum gap between two samples of system.jsonl, as a multiple of the usual one."""
COUNTS = ("steps", "eval_cases", "eval_samples", "eval_overlap", "train_cases", "cases", "samples", "overlap")


class OptionRow(TypedDict):
    """An option with its value and its default, as text."""

    name: str
    value: str
    default: str
    is_default: bool


class Curves(TypedDict):
    """The numbers of the training steps by their names, each as long as `step`."""

    step: list[int]
    series: dict[str, list[float | None]]


class Selection(TypedDict):
    """The step that --save-best chose, its score, the number of scorings that were compared, and of their cases if they
    are in no other score."""

    score: float
    step: int | None
    scorings: int | None
    cases: int | None


class ScoredStep(TypedDict):
    """The held-out scores of the policy after a step."""

    step: int
    sampled: IntervalValues | None
    greedy: IntervalValues | None
    environments: NotRequired[dict[str, IntervalValues | None]]
    """The sampled score of each of several environments."""


class EpisodeCounts(TypedDict):
    """Numbers of episodes, by kind."""

    all: int
    held_out: int
    failed: int
    damaged: int
    failures: dict[str, int]
    stops: dict[str, int]
    eval_phases: list[str]
    steps: list[int]
    """Steps that have training episodes, ascending."""


class Evaluation(TypedDict):
    """What result.json of an eval has beside the scores: values by decoding, and the environment's metrics."""

    model: str
    values: dict[str, dict[str, float]]
    """Numbers by `sampled` and `greedy`, by what they are."""


class FindingRow(TypedDict):
    """A finding of the diagnostics: its name in docs/diagnostics.md, its step, and the advice."""

    name: str
    step: int
    text: str


class SystemCurves(TypedDict):
    """The use of CPU, memory and GPUs, each series as long as `minutes`."""

    minutes: list[float]
    series: dict[str, list[float | None]]


class NodeUse(TypedDict):
    """One of several machines that trained together."""

    host: str
    address: str
    processes: int
    system: SystemCurves


class RunSummary(RunState):
    """The part of a page above the cases and rollouts."""

    name: str
    result: dict[str, float | None]
    """Some numbers of result.json."""
    environment: JsonObject
    options: list[OptionRow]
    curves: Curves
    system: SystemCurves
    machines: list[NodeUse]
    """The machines; none if there is one."""
    scores: ScoreTable
    evaluation: Evaluation | None
    """The rest of an eval's result."""
    selection: Selection | None
    bounds: Bounds | None
    held_out: list[ScoredStep]
    episodes: EpisodeCounts | None
    verdict: Verdict | None
    """Whether the model is better, by `scores`."""
    learned: bool
    """Whether the completions of a group differed in score in any step; without that, no step changed the weights."""
    findings: list[FindingRow]
    """What the diagnostics found."""
    advice: str
    next_steps: list[NextStep]


def summary(folder: Path, rollouts: RolloutIndex | None) -> RunSummary:
    """The summary of the run in a folder. Without rollouts, which may not be read yet, the curve of held-out scores has
    no intervals."""
    run = RunFolder(folder)
    result, state = read_object(run.result), run_state(folder)
    lines = list(read_metrics(run.metrics))
    selection: Selection | None = None
    if (score := as_float(result.get("selection_score"))) is not None:
        step, scorings = as_int(result.get("model_step")), as_int(result.get("selection_scorings"))
        cases = as_int(result.get("selection_cases"))
        selection = {"score": score, "step": step, "scorings": scorings, "cases": cases}
    is_eval = state["job"] == "eval"
    table = eval_scores(run, rollouts) if is_eval else scores(run, rollouts)
    return {
        **state,
        "name": folder.name,
        "step": state["step"] or max((line.step for line in lines), default=None),
        "result": {"seconds": as_float(result.get("seconds")), **{name: as_int(result.get(name)) for name in COUNTS}},
        "environment": read_object(run.environment),
        "options": option_rows(run.config, state["job"]),
        "curves": curves(lines),
        "system": system_curves(run.system),
        "machines": [_machine(run, node) for node in read_nodes(read_object(run.status))],
        "scores": table,
        "evaluation": evaluation(result) if is_eval else None,
        "selection": selection,
        "bounds": bounds_of_mean(_mixture(run)),
        "held_out": held_out_curve(run, rollouts) if rollouts else _recorded_curve(lines, result),
        "episodes": count(rollouts) if rollouts else None,
        "verdict": verdict_of_scores(table),
        "learned": not learned_nothing(lines),
        "findings": [{"name": one.name, "step": one.step, "text": one.text} for one in findings_of(run)],
        "advice": advice(run),
        "next_steps": next_steps(run),
    }


# -- options


def option_rows(path: Path, job: str = "grpo") -> list[OptionRow]:
    """The run's options in config.yaml, with their defaults, in the order of the job's options."""
    given = read_options(path)
    fields = (EvalConfig if job == "eval" else TrainConfig).model_fields
    names = [*(name for name in fields if name in given), *(name for name in given if name not in fields)]
    defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
    rows: list[OptionRow] = []
    for name in names:
        value, default = without_secrets(given[name]), defaults.get(name)
        is_default, text = value == default, _shown(value)
        rows.append({"name": str(name), "value": text, "default": _shown(default), "is_default": is_default})
    return rows


def _shown(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)


# -- curves


def curves(lines: Iterable[MetricsLine]) -> Curves:
    """The curves of the lines that are training steps."""
    steps = [(line.step, line.series) for line in lines if not line.is_scoring]
    names = {name: None for _, series in steps for name in series}
    size = -(-len(steps) // POINTS)
    buckets = [steps[start : start + size] for start in range(0, len(steps), size)] if steps else []
    drawn = {name: [_mean(series.get(name) for _, series in bucket) for bucket in buckets] for name in names}
    return {
        "step": [bucket[-1][0] for bucket in buckets],
        "series": {name: values for name, values in drawn.items() if any(value is not None for value in values)},
    }


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def system_curves(path: Path) -> SystemCurves:
    """The curves of system.jsonl, over the minutes in which the run was running: a pause until it was resumed counts as
    a few samples."""
    lines = [line for line in read_lines(path) if as_float(line.get("time")) is not None]
    times = [as_float(line.pop("time")) or 0.0 for line in lines]
    gaps = [max(0.0, later - earlier) for earlier, later in pairwise(times)]
    longest = LONGEST_GAP * median(gaps) if gaps else 0.0
    seconds = [0.0, *accumulate(min(gap, longest) for gap in gaps)]
    names = {name: None for line in lines for name in line}
    return {
        "minutes": [round(one / 60, 3) for one in seconds][: len(lines)],
        "series": {name: [as_float(line.get(name)) for line in lines] for name in names},
    }


def _machine(run: RunFolder, node: NodeInfo) -> NodeUse:
    curves = system_curves(run.system_of(node.rank))
    return {"host": node.host, "address": node.address, "processes": len(node.pids), "system": curves}


# -- scores before and after


def scores(run: RunFolder, rollouts: RolloutIndex | None) -> ScoreTable:
    """The held-out scores of result.json, or of the rollouts while there is no result."""
    result = read_object(run.result)
    recorded = recorded_table(result.get("scores"))
    if recorded is not None and read_object(run.status).get("status") != "running":
        return recorded
    if rollouts is None:
        return _recorded_scores(result)
    options = read_options(run.config)
    tries = as_int(options.get("eval_samples")) or 1
    return score_table(_ends(rollouts.entries), _mixture(run, rollouts), tries)


def _mixture(run: RunFolder, rollouts: RolloutIndex | None = None) -> Mixture:
    """The environments of the run, with the held-out cases of its rollouts."""
    cases = {} if rollouts is None else rollouts.held_out
    return recorded_mixture(read_object(run.environment), read_options(run.config), cases)


def _ends(entries: Iterable[IndexEntry]) -> dict[str, Scoring]:
    """The scorings before and after training; if there is one after, the one before only with its cases."""
    ends = [entry for entry in entries if entry.eval_phase.startswith(("before", "after"))]
    played = {entry.case for entry in ends if entry.eval_phase.startswith("after")} or {entry.case for entry in ends}
    return {
        when: by_case(
            (e.case, e.score) for e in ends if e.eval_phase == when and e.score is not None and e.case in played
        )
        for when in {entry.eval_phase for entry in ends}
    }


def _recorded_scores(result: JsonObject) -> ScoreTable:
    def row(name: str) -> ScoreRow:
        before, after = _bare(result.get(f"{name}_before")), _bare(result.get(f"{name}_after"))
        return {"before": before, "after": after, "change": None}

    return {"sampled": row("score"), "greedy": row("greedy")}


def _bare(value: object) -> IntervalValues | None:
    mean = as_float(value)
    return None if mean is None else {"mean": mean, "low": None, "high": None, "count": None}


# -- the scores of an eval


def eval_scores(run: RunFolder, rollouts: RolloutIndex | None) -> ScoreTable:
    """The scores of an eval as scores after training: those of result.json, or of the rollouts without a result."""
    result = read_object(run.result)
    recorded = {str(name): interval_of(value) for name, value in as_object(result.get("scores")).items()}
    if not recorded and rollouts is not None:
        phases: Phases = {}
        for entry in rollouts.entries:
            phases.setdefault(entry.eval_phase, []).append(entry)
        recorded = {name: _interval(phases, name, _mixture(run, rollouts)) for name in DECODINGS}
    tries = {str(2**power) for power in range(1, 20)} | {str(as_int(result.get("samples")))}
    chances = {name: value for name, value in as_object(result.get("pass_at")).items() if name in tries - {"1"}}
    recorded |= {f"pass@{name}": interval_of(value) for name, value in chances.items()}
    return {name: {"before": None, "after": value, "change": None} for name, value in recorded.items()}


def evaluation(result: JsonObject) -> Evaluation:
    """Numbers of an eval's result by decoding; what is missing or of a wrong type is left out."""
    values: dict[str, dict[str, float]] = {}

    def add(what: str, decoding: str, value: object) -> None:
        if (number := as_float(value)) is not None:
            values.setdefault(what, {})[decoding] = number

    for decoding in DECODINGS:
        add("share of cases solved at least once", decoding, as_object(result.get("solved")).get(decoding))
        lengths = as_object(as_object(result.get("lengths")).get(decoding))
        for name in ("mean", "median", "max"):
            add(f"tokens of an episode, {name}", decoding, lengths.get(name))
        add("turns of an episode, mean", decoding, as_object(result.get("turns")).get(decoding))
        for name, value in as_object(as_object(result.get("metrics")).get(decoding)).items():
            add(name, decoding, value)
    return {"model": as_text(as_object(result.get("model")).get("label")), "values": values}


def held_out_curve(run: RunFolder, rollouts: RolloutIndex) -> list[ScoredStep]:
    """The held-out scores by weight version: of the cases that were played during the training, if there are any. For
    the step of model/, the scores after training replace earlier ones."""
    mixture = _mixture(run, rollouts)
    during = {entry.case for entry in rollouts.entries if entry.eval_phase.startswith("step")}
    points: dict[int, Phases] = {}
    for entry in rollouts.entries:
        if entry.eval_phase and (entry.case in during or not during):
            points.setdefault(entry.weight_version, {}).setdefault(entry.eval_phase, []).append(entry)
    curve: list[ScoredStep] = []
    for step, found in sorted(points.items()):
        sampled, greedy = (_interval(found, name, mixture) for name in DECODINGS)
        each = {one.name: _interval(found, "sampled", (one,)) for one in named(mixture)}
        own: ScoredStep = {"step": step, "sampled": sampled, "greedy": greedy}
        curve.append({**own, "environments": each} if each else own)
    return curve


def _interval(scorings: Phases, decoding: str, mixture: Mixture) -> IntervalValues | None:
    names = sorted((name for name in scorings if name.endswith(decoding)), key=lambda name: name.startswith("after"))
    entries = scorings[names[-1]] if names else []
    scored = by_case((entry.case, entry.score) for entry in entries if entry.score is not None)
    return interval_of_mean(scored, mixture)


def _recorded_curve(lines: Iterable[MetricsLine], result: JsonObject) -> list[ScoredStep]:
    points: list[ScoredStep] = [
        {"step": line.step, "sampled": _bare(line.eval_score), "greedy": _bare(line.eval_greedy)}
        for line in lines
        if line.is_scoring
    ]
    sampled, greedy = (_recorded_scores(result)[name] for name in DECODINGS)
    last = as_int(result.get("model_step", result.get("steps")))
    if sampled["before"] or greedy["before"]:
        points = [point for point in points if point["step"] != 0]
        points.append({"step": 0, "sampled": sampled["before"], "greedy": greedy["before"]})
    if last is not None and (sampled["after"] or greedy["after"]):
        points = [point for point in points if point["step"] != last]
        points.append({"step": last, "sampled": sampled["after"], "greedy": greedy["after"]})
    return sorted(points, key=lambda point: point["step"])


# -- episodes


def count(rollouts: RolloutIndex) -> EpisodeCounts:
    """Count episodes by kind."""
    entries = rollouts.entries
    failures = Counter(entry.failure for entry in entries if entry.failure)
    return {
        "all": len(entries),
        "held_out": sum(entry.is_held_out for entry in entries),
        "failed": failures.total(),
        "damaged": rollouts.damaged,
        "failures": failures,
        "stops": Counter(entry.stop for entry in entries),
        "eval_phases": list(dict.fromkeys(entry.eval_phase for entry in entries if entry.eval_phase)),
        "steps": sorted({entry.step for entry in entries if not entry.eval_phase}),
    }
