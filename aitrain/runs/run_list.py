"""Lists the trainings, evals and sweeps of a folder with status, progress and scores, read from their files."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aitrain.errors import ConfigError
from aitrain.runs.heartbeat import SILENCE, is_alive, silence
from aitrain.runs.json_values import JsonObject, as_float, as_int, as_object, as_text, regular
from aitrain.runs.metrics_line import MetricsLine, lines_of
from aitrain.runs.node_info import NodeInfo, read_nodes
from aitrain.runs.run_folder import RunFolder, read_object

TAIL = 1 << 17
"""Bytes at either end of metrics.jsonl that are searched for the first and the last reward."""
ENDED = ("finished", "failed", "stopped", "stalled")


@dataclass(frozen=True)
class Run:
    """One training, eval or sweep.

    A sweep has the scores of its best trial, and trials as its steps; an eval has episodes as its steps.
    `status` is running, finished, failed, stopped, stalled (no progress: it was ended, or hangs and cannot be ended),
    dead (recorded as running, but its process is gone), damaged (without a valid status), or foreign (not the folder of
    a run). Scores are None if there are none; `age` is in seconds since the last heartbeat.
    """

    name: str
    path: str
    status: str
    step: int | None = None
    steps: int | None = None
    score_before: float | None = None
    score_after: float | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    age: float | None = None
    pid: int | None = None
    host: str | None = None
    job: str = "grpo"
    """`grpo`, `eval` or `sweep`."""
    nodes: tuple[NodeInfo, ...] = ()
    """The machines, if there are several; `host` and `pid` are those of the first one."""


def runs_in(parent: Path) -> list[Run]:
    """The runs of a folder, the one with the latest heartbeat first; for a run folder, that run alone; for a sweep, its
    trials.

    Raises:
        ConfigError: the folder cannot be read.
    """
    if RunFolder(parent).config.is_file():
        return [look(parent)]
    try:
        folders = [Path(entry.path) for entry in os.scandir(parent) if entry.is_dir()]
    except OSError as error:
        raise ConfigError(f"cannot read {parent}: {error.strerror}") from None
    return sorted(map(look, folders), key=lambda run: (math.inf if run.age is None else run.age, run.name))


def look(path: Path) -> Run:
    """The run of a folder; unreadable or foreign files do not raise."""
    folder = RunFolder(path)
    try:
        files = {file.name for file in path.iterdir()}
    except OSError:
        return Run(path.name, str(path), "damaged")
    if not files & {folder.config.name, folder.status.name, folder.result.name, folder.metrics.name}:
        return Run(path.name, str(path), "foreign")
    status, result = read_object(folder.status), read_object(folder.result)
    ends = [_rewarded(folder.metrics, is_last) for is_last in (False, True)]
    step, age = step_of_run(folder, status), silence(status)
    if age is None:
        with suppress(OSError):
            age = silence({"heartbeat": path.stat().st_mtime})
    job = as_text(status.get("job")) or as_text(result.get("job")) or "grpo"
    scores = as_object(result.get("scores")) if job == "eval" else {}
    score = as_object(scores.get("sampled")) or as_object(scores.get("greedy"))
    return Run(
        name=path.name,
        path=str(path),
        status=state_of(status),
        step=as_int(result.get("steps")) if step is None else step,
        steps=as_int(status.get("steps")),
        score_before=as_float(result.get("score_before")),
        score_after=as_float(score.get("mean") if job == "eval" else result.get("score_after")),
        reward_first=ends[0].reward if ends[0] else None,
        reward_last=ends[1].reward if ends[1] else None,
        age=age,
        pid=as_int(status.get("pid")),
        host=status["host"] if isinstance(status.get("host"), str) else None,
        job=job,
        nodes=read_nodes(status),
    )


def state_of(status: JsonObject) -> str:
    """The status of a run by its status.json, see `Run`."""
    recorded = status.get("status")
    if recorded in ENDED:
        return str(recorded)
    if recorded != "running":
        return "damaged"
    if not is_alive(status):
        return "dead"
    stalls_at = as_float(status.get("stalls_at"))
    return "stalled" if stalls_at is not None and time.time() > stalls_at + SILENCE else "running"


def step_of_run(folder: RunFolder, status: JsonObject) -> int | None:
    """Steps that a run has done, by its status.json; if it has ended, also those after its last heartbeat."""
    step = as_int(status.get("step"))
    if state_of(status) == "running":
        return step
    last = _rewarded(folder.metrics, is_last=True)
    return max(step or 0, last.step) if last else step


def _rewarded(metrics: Path, is_last: bool = False) -> MetricsLine | None:
    """The first line with a reward in the first TAIL bytes, or the last one in the last."""
    try:
        with open(metrics, "rb", opener=regular) as file:
            file.seek(max(0, metrics.stat().st_size - TAIL) if is_last else 0)
            lines = file.read(TAIL).splitlines()
    except OSError:
        return None
    return next((line for line in lines_of(lines[::-1] if is_last else lines) if line.reward is not None), None)
