"""Status, reason and rows of runs of all kinds, read from small files that may be damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from aitrain.cli.show import show
from aitrain.errors import ConfigError
from aitrain.runs.heartbeat import Heartbeat, Progress, sign_of_life
from aitrain.runs.model_reference import read_model
from aitrain.runs.run_folder import RunFolder, append_lines, read_object, write_json
from aitrain.runs.run_list import runs_in
from aitrain.ui.cases import CaseRow, case_changes
from aitrain.ui.run_registry import RunRegistry
from aitrain.ui.run_rows import POINTS, run_row, stamp, sweep_row
from aitrain.ui.run_state import DEAD, LOG_LINES, run_state
from aitrain.ui.summary import summary
from tests.ui.conftest import record, write_run
from tests.ui.made_runs import make_eval, make_failed, make_live, make_run, make_sweep


def test_a_failed_run_knows_why_and_how_to_go_on(tmp_path: Path) -> None:
    run = make_failed(tmp_path / "run")
    (run.log).write_text("".join(f"line {n}\n" for n in range(500)) + "key sk-abcdefghijklmnopqrstuvwxyz\n")
    state = run_state(run.path)
    assert (state["status"], state["reason"]) == ("failed", "Out of memory in step 4.\nLower --batch-size.")
    assert state["next"] == f"aitrain grpo --config {run.config} --resume"
    assert len(state["log"].splitlines()) == LOG_LINES
    assert "sk-abc" not in state["log"]
    run.write_status("finished")  # the reason of an earlier failure stays in the file
    assert (run_state(run.path)["reason"], run_state(run.path)["log"]) == ("", "")


def test_a_run_that_was_killed_is_dead_and_an_eval_is_continued_by_its_own_command(tmp_path: Path) -> None:
    run = make_live(tmp_path / "run")
    before = stamp(run.path)
    assert run_state(run.path)["status"] == "running"
    write_json(run.status, {**read_object(run.status), "started": 1})
    assert stamp(run.path) != before
    state = run_state(run.path)
    assert (state["status"], state["reason"], state["ends_at"], state["phase"]) == ("dead", DEAD, None, "")
    stopped = make_eval(tmp_path / "eval")
    stopped.write_status("stopped")
    assert run_state(stopped.path)["next"] == f"aitrain eval --config {stopped.config} --resume"


def test_the_heartbeat_keeps_the_reason_of_a_failure_and_when_a_run_will_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    progress = Progress(ends_at=5.0, score_before=0.25)
    with pytest.raises(ValueError), Heartbeat(folder, progress):
        raise ValueError("too small")
    status = read_object(folder.status)
    assert (status["reason"], status["ends_at"], status["score_before"]) == ("ValueError: too small", 5.0, 0.25)


def test_a_row_has_a_short_curve_and_the_newest_score(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [], "running", **sign_of_life(), rewards=[n / 1000 for n in range(1000)])
    append_lines(run.metrics, [{"step": 500, "eval_score": 0.5}, {"step": 1000, "eval_score": 0.75}])
    with run.metrics.open("ab") as file:
        file.write(b'\xff"reward"\n{"reward": 0.9, "half')
    row = run_row(run.path)
    assert len(row["rewards"]) in (POINTS - 1, POINTS)
    assert (row["rewards"][0], row["rewards"] == sorted(row["rewards"])) == (0.0, True)
    assert row["after"] == {"mean": 0.75, "low": None, "high": None, "count": None}
    assert (row["after_step"], row["model"], row["environment"]) == (1000, "Qwen/Qwen3-0.6B", "my_envs.hotel:HotelEnv")


def test_rows_of_damaged_folders_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    damaged = write_run(tmp_path / "damaged", [])
    for name in ("status.json", "result.json", "config.yaml", "metrics.jsonl", "system.jsonl"):
        (damaged / name).write_bytes(b'{"scores": [1], \xff')
    row = run_row(damaged)
    assert (row["status"], row["after"], row["rewards"], row["model"]) == ("unknown", None, [], "")
    json.dumps(summary(damaged, None), allow_nan=False)
    (damaged / "sweep.json").write_text("[]")
    assert sweep_row(damaged)["status"] == "unknown"


ALIASES = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30))
HARM: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "an endless line": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
    "a deep value": lambda path: path.write_text("model: " + "[" * 200_000),
    "aliases": lambda path: path.write_text(ALIASES + "model: *a29\nrl_env: *a29\n"),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.slow
def test_a_folder_that_somebody_made_to_do_harm_is_listed_and_shown_and_keeps_nobody_waiting(
    harm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_failed(tmp_path / "good")
    write_run(tmp_path / "bad", [])
    names = "config.yaml", "environment.json", "result.json", "status.json", "metrics.jsonl", "diagnostics.jsonl"
    for name in (*names, "system.jsonl", "train.log", "rollouts/rank0.jsonl"):
        (tmp_path / "bad" / name).unlink(missing_ok=True)
        HARM[harm](tmp_path / "bad" / name)
    assert {run.name: run.status for run in runs_in(tmp_path)} == {"good": "failed", "bad": "damaged"}
    assert {row["name"]: row["status"] for row in RunRegistry([tmp_path]).rows()} == {
        "good": "failed",
        "bad": "unknown",
    }
    with suppress(ConfigError):
        show(str(tmp_path / "bad"))
    with pytest.raises(ConfigError):
        read_model(str(tmp_path / "bad"))
    capsys.readouterr()


def test_the_row_of_a_sweep_is_its_best_trial(tmp_path: Path) -> None:
    row = sweep_row(make_sweep(tmp_path / "sweep"))
    assert (row["job"], row["status"], row["step"], row["steps"]) == ("sweep", "finished", 2, 2)
    assert (row["model"], row["seconds"]) == ("tiny", 30.0)
    assert row["before"] is not None
    assert (row["before"]["mean"], row["after"] and row["after"]["mean"]) == (0.2, 0.8)


def test_an_eval_that_goes_on_has_the_scores_of_its_records(tmp_path: Path) -> None:
    from aitrain.runs.rollout_index import RolloutIndex

    run = make_eval(tmp_path / "eval")
    run.result.unlink()
    rollouts = RolloutIndex(run.rollouts)
    rollouts.refresh()
    scores = summary(run.path, rollouts)["scores"]
    assert (scores["sampled"]["after"] or {})["mean"] == 0.625
    assert scores["sampled"]["before"] is None


def test_cases_are_counted_by_the_direction_of_their_change() -> None:
    changes = [1.0, 1e-12, -1e-12, 0.0, -0.5, None]
    rows = [CaseRow(str(n), "", n > 0, "", 2, 0, None, None, change, None, None) for n, change in enumerate(changes)]
    assert case_changes(rows) == {
        "held_out": {"better": 0, "same": 3, "worse": 1, "once": 1},
        "training": {"better": 1, "same": 0, "worse": 0, "once": 0},
    }


def test_records_without_a_rendered_prompt_find_it_in_their_group(tmp_path: Path) -> None:
    from aitrain.runs.rollout_index import RolloutIndex
    from aitrain.ui.episodes import Limit, episode

    records = [record(group=1, rendered_prompt="<user>1 + 1"), record(group=1), record(group=2)]
    rollouts = RolloutIndex(write_run(tmp_path / "run", records) / "rollouts")
    rollouts.refresh()
    shown = [episode(rollouts, number, Limit(6, 9, 9))["rendered"] for number in range(3)]
    assert shown == [{"text": "<user>", "length": 11}] * 2 + [{"text": ""}]
    same = [episode(rollouts, number)["same"] for number in range(3)]
    assert same[0] == same[1] == same[2]
