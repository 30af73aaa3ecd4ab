"""Diagnostics of a training: reported while it runs, once, also after it is resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain import Result
from aitrain.runs.checkpoint import Manifest
from aitrain.runs.diagnosis import findings_of
from aitrain.runs.level_rules import LINES_IN_A_ROW, RunTraits
from aitrain.runs.metrics_line import MetricsLine
from aitrain.runs.run_folder import RunFolder, append_lines, keep_lines
from aitrain.training.diagnostics import DiagnosticsCallback
from aitrain.training.run_recorder import RunRecorder


class Same:
    """All answers are worth the same."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(12)]

    def score_episode(self) -> float:
        return 0.0


def test_a_run_that_cannot_learn_says_so_while_it_runs_and_stops_itself_when_it_may(
    train: Callable[..., Result], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = LINES_IN_A_ROW + 1
    result = train(Same(), max_steps=50, stop_when_flat=steps)

    assert capsys.readouterr().err.count("100% of the groups all completions score the same, at 0") == 1
    assert {"frac_reward_zero_std", "completions/clipped_ratio", "unscored", "entropy"} <= set(result.history[0])
    assert "prompt_dependence" in result.history[0]
    assert "zero_variance" in [finding.name for finding in findings_of(RunFolder(result.folder))]

    written = json.loads((result.folder / "result.json").read_text())
    assert result.status == written["status"] == "stopped"
    assert (result.steps, written["score_after"]) == (steps, 0.0)
    assert written["stopped_because"].startswith(f"in {steps} steps no group's scores differed")
    assert (result.folder / "checkpoints" / f"checkpoint-{steps}").exists()


# -- notes


def reporting(folder: RunFolder, said: list[str], step: int | None = None) -> DiagnosticsCallback:
    """The callback of a run in the folder, resumed from the checkpoint of a step."""
    recorder = RunRecorder(folder, None)
    recorder.resumed_from = None if step is None else Manifest(step, {}, {}, "", 1, {})
    callback = DiagnosticsCallback(said.append, recorder, RunTraits())
    callback.on_train_begin(None, SimpleNamespace(is_world_process_zero=True), None)
    return callback


def log(callback: DiagnosticsCallback, folder: RunFolder, steps: range) -> None:
    """Lines in which the entropy collapses at step 10."""
    for step in steps:
        logs = {"reward": 0.5, "entropy": 2.0 if step < 10 else 0.01}
        append_lines(folder.metrics, [MetricsLine.of_logs(step, 0.0, logs).to_json()])
        callback.on_log(None, SimpleNamespace(is_world_process_zero=True, global_step=step), None, logs)


@pytest.mark.parametrize("step", [8, 13, 23])
def test_a_finding_is_shown_once_however_often_a_run_is_killed_and_resumed_from_a_step(
    step: int, tmp_path: Path
) -> None:
    """Later lines of metrics are deleted then, and the findings are those of a run that was never stopped."""
    folder, said, whole = RunFolder(tmp_path / "killed"), list[str](), RunFolder(tmp_path / "whole")
    for each in (folder, whole):
        each.path.mkdir()
        log(reporting(each, said), each, range(1, 30))
    for _ in range(3):
        callback = reporting(folder, said, step=step)
        keep_lines(folder.metrics, lambda line: int(str(line["step"])) <= step)
        log(callback, folder, range(step + 1, 30))

    (found,) = findings_of(whole)
    assert said == [found.text] * 2
    assert findings_of(folder) == [found]
