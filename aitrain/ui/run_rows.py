"""The rows of the page's table of runs, from small files of the run folder: no rollouts are read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from aitrain.redaction import redact
from aitrain.runs.held_out import IntervalValues, recorded_table
from aitrain.runs.json_values import JsonObject, as_float, as_object, as_text, regular
from aitrain.runs.metrics_line import MetricsLine, lines_of
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.runs.run_list import state_of
from aitrain.runs.run_options import read_options
from aitrain.runs.verdict import Verdict, verdict_of
from aitrain.ui.run_state import run_state

POINTS = 48
"""Points of a row's curve."""
MOST_METRICS = 32 * 2**20
"""Bytes at the end of metrics.jsonl that are read."""


class RunRow(TypedDict):
    """A run in the table; what is unknown is None or empty."""

    name: str
    job: str
    status: str
    reason: str
    """The first line of why it failed."""
    phase: str
    model: str
    environment: str
    rewards: list[float]
    """The curve of the training rewards, at most POINTS of its points."""
    before: IntervalValues | None
    after: IntervalValues | None
    """The score after training, or while it lasts the newest one."""
    after_step: int | None
    """The step of a score during the training."""
    change: IntervalValues | None
    learned: bool
    """As in RunSummary."""
    verdict: Verdict | None
    step: float | None
    steps: float | None
    seconds: float | None
    ends_at: float | None
    heartbeat: float | None
    """The last sign of life, or when the folder was changed."""


def run_row(folder: Path) -> RunRow:
    """The row of the run in a folder; files that are damaged count as missing."""
    run, state = RunFolder(folder), run_state(folder)
    result = read_object(run.result)
    rewards, newest, learned = _curve(run.metrics)
    table: dict[str, object] = as_object(result.get("scores"))
    if state["job"] == "eval":
        table = {"sampled": {"after": table.get("sampled") or table.get("greedy")}}
    sampled = (recorded_table(table) or {}).get("sampled")
    is_running = state["status"] == "running" and state["job"] != "sweep"  # which has the score of its best trial
    before = sampled["before"] if sampled else _bare(result.get("score_before"))
    after = None if is_running else sampled["after"] if sampled else _bare(result.get("score_after"))
    change = sampled["change"] if sampled and not is_running else None
    before = before or _bare(read_object(run.status).get("score_before"))
    model, environment = _names(run, result)
    return {
        "name": folder.name,
        "job": state["job"],
        "status": state["status"],
        "reason": state["reason"].partition("\n")[0][:300],
        "phase": state["phase"],
        "model": model,
        "environment": environment,
        "rewards": rewards,
        "before": before,
        "after": after or (_bare(newest.eval_score) if newest else None),
        "after_step": newest.step if newest and after is None else None,
        "change": change,
        "learned": learned,
        "verdict": verdict_of(change),
        "step": as_float(result.get("steps")) if state["step"] is None else state["step"],
        "steps": state["steps"],
        "seconds": as_float(result.get("seconds")),
        "ends_at": state["ends_at"],
        "heartbeat": state["heartbeat"] or _changed(folder),
    }


def _bare(value: object) -> IntervalValues | None:
    """A score without an interval."""
    mean = as_float(value)
    return None if mean is None else {"mean": mean, "low": None, "high": None, "count": None}


def _curve(metrics: Path) -> tuple[list[float], MetricsLine | None, bool]:
    """Evenly spread rewards, the newest scoring of the held-out cases, and whether a step changed the weights."""
    try:
        with open(metrics, "rb", opener=regular) as file:
            file.seek(max(0, metrics.stat().st_size - MOST_METRICS))
            lines = [line for line in file.read(MOST_METRICS).split(b"\n")[:-1] if line]
    except OSError:
        return [], None, True
    scorings = [line for line in lines if b'"eval_score"' in line]
    steps = [line for line in lines if b'"reward"' in line]
    rewards = [line.reward for line in lines_of(evenly(steps, POINTS))]
    newest = next(lines_of(scorings[-1:]), None)
    unchanged = (b'"frac_reward_zero_std": 1.0', b'"learning_rate": 0.0,')
    learned = not steps or any(all(mark not in line for mark in unchanged) for line in steps)
    return [reward for reward in rewards if reward is not None], newest, learned


def evenly(lines: Sequence[bytes], most: int) -> Sequence[bytes]:
    """At most `most` lines, evenly spread, with the first and the last one."""
    if len(lines) <= most:
        return lines
    return [lines[round(place * (len(lines) - 1) / (most - 1))] for place in range(most)]


def _names(run: RunFolder, result: JsonObject) -> tuple[str, str]:
    """Model and environment, of the result or of the options."""
    given = result.get("model")
    model = as_text(result.get("base_model")) or (as_text(given.get("label")) if isinstance(given, dict) else "")
    environment = as_text(result.get("environment"))
    if not (model and environment):
        options = read_options(run.config)
        model = model or as_text(options.get("model"))
        environment = environment or _environment(options)
    return redact(model), redact(environment)


def _environment(options: JsonObject) -> str:
    given = options.get("rl_env")
    return ", ".join(map(as_text, given)) if isinstance(given, list) else as_text(given)


def _changed(folder: Path) -> float | None:
    try:
        return folder.stat().st_mtime
    except OSError:
        return None


def stamp(folder: Path) -> tuple[object, ...]:
    """Changes whenever the row of a run changes, and not with the heartbeat alone."""
    run = RunFolder(folder)
    status = read_object(run.status)
    known = {name: value for name, value in status.items() if name not in ("heartbeat", "stalls_at")}
    stamps: list[object] = [str(known), state_of(status)]
    for path in (run.metrics, run.result, run.config, run.system):
        with suppress(OSError):
            stat = path.stat()
            stamps += [stat.st_size, stat.st_mtime_ns]
    return tuple(stamps)
