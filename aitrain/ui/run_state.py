"""How far a run is, and if it has ended early, why and what to do next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TypedDict

from aitrain.redaction import redact
from aitrain.runs.json_values import JsonObject, as_float, as_text, regular
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.runs.run_list import state_of, step_of_run
from aitrain.ui.next_steps import continuing

FAILED = ("failed", "stalled", "dead")
LOG_BYTES, LOG_LINES = 16_000, 60
"""Limits of the end of train.log that a page shows."""
DEAD = "The run's process has ended without a word: it was killed, or the machine went down."


class RunState(TypedDict):
    """The status of a run; what is unknown is None or empty."""

    status: str
    job: str
    """`grpo` or `eval`."""
    phase: str
    step: float | None
    steps: float | None
    ends_at: float | None
    """Estimated time of the last step."""
    heartbeat: float | None
    reason: str
    """Why it failed or stopped."""
    next: str
    """The command that continues it."""
    log: str
    """The end of train.log of a run that failed."""


def run_state(folder: Path) -> RunState:
    """The status of the run in a folder."""
    run = RunFolder(folder)
    status, result = read_object(run.status), read_object(run.result)
    state = state_of(status) if status else as_text(result.get("status")) or "unknown"
    job = as_text(status.get("job")) or as_text(result.get("job")) or "grpo"
    has_ended_early = state in (*FAILED, "stopped")
    return {
        "status": "unknown" if state == "damaged" else state,
        "job": job,
        "phase": as_text(status.get("phase")) if state == "running" else "",
        "step": step_of_run(run, status),
        "steps": as_float(status.get("steps")),
        "ends_at": as_float(status.get("ends_at")) if state == "running" else None,
        "heartbeat": as_float(status.get("heartbeat")),
        "reason": _reason(state, status, result) if has_ended_early else "",
        "next": _command(run, job) if has_ended_early else "",
        "log": _end_of_log(run.log) if state in FAILED else "",
    }


def _reason(state: str, status: JsonObject, result: JsonObject) -> str:
    if state == "dead":
        return DEAD
    if state == "stopped":
        return as_text(result.get("stopped_because"))
    return as_text(status.get("reason"))


def _command(run: RunFolder, job: str) -> str:
    """The command that continues the run; empty if nothing was saved."""
    if job == "eval":
        return f"aitrain eval --config {shlex.quote(str(run.config))} --resume" if run.config.is_file() else ""
    return continuing(run)


def _end_of_log(path: Path) -> str:
    """The last lines of a log, without secrets, which one of an earlier version may hold."""
    try:
        with open(path, "rb", opener=regular) as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            lines = file.read(LOG_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return redact("\n".join(line.rpartition("\r")[2] for line in lines[-LOG_LINES:]))
