"""Status, reason, rows and cases of runs of all kinds, read from small files that may be damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.run_folder import read_object, write_json
from aitrain.ui.episodes import Query, case_rows, find
from aitrain.ui.overview import DEAD, LOG_LINES, Overview
from aitrain.ui.run_registry import run_rows
from tests.ui.conftest import read, record, write_run
from tests.ui.made_runs import make_eval, make_failed, make_live, make_run


def state_of(folder: Path) -> dict[str, Any]:
    return Overview(folder).state


def test_a_failed_run_knows_why_and_how_to_go_on(tmp_path: Path) -> None:
    run = make_failed(tmp_path / "run")
    (run.log).write_text("".join(f"line {n}\n" for n in range(500)) + "key sk-abcdefghijklmnopqrstuvwxyz\n")
    state = state_of(run.path)
    assert (state["status"], state["reason"]) == ("failed", "Out of memory in step 4.\nLower --batch-size.")
    assert state["next"] == f"aitrain grpo --config {run.config} --resume"
    assert len(state["log"].splitlines()) == LOG_LINES
    assert "sk-abc" not in state["log"]
    run.write_status("finished")  # the reason of an earlier failure stays in the file
    assert (state_of(run.path)["reason"], state_of(run.path)["log"]) == ("", "")


@pytest.mark.parametrize("scores", [3, [1], {"sampled": 3}])
def test_an_eval_whose_scores_are_of_another_type_has_none(tmp_path: Path, scores: object) -> None:
    run = make_eval(tmp_path / "run")
    assert list(Overview(run.path).scores) == ["sampled", "pass@2"]
    write_json(run.result, {**read_object(run.result), "scores": scores})
    assert Overview(run.path).row()["after"] is None


def test_a_run_that_was_killed_is_dead(tmp_path: Path) -> None:
    run = make_live(tmp_path / "run")
    assert state_of(run.path)["status"] == "running"
    write_json(run.status, {**read_object(run.status), "heartbeat": 1})
    state = state_of(run.path)
    assert (state["status"], state["reason"], state["phase"]) == ("dead", DEAD, "training")


ALIASES = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 30))
ODD = '{"status": ["running"], "step": "three", "heartbeat": "now", "pid": {}, "host": 3}'
HARM: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "an endless line": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
    "odd values": lambda path: path.write_text(ODD),
    "aliases": lambda path: path.write_text(ALIASES + "model: *a29\nrl_env: *a29\n"),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.slow
def test_a_folder_that_somebody_made_to_do_harm_is_listed_and_shown_and_keeps_nobody_waiting(
    harm: str, tmp_path: Path
) -> None:
    make_failed(tmp_path / "good")
    write_run(tmp_path / "bad", [])
    names = "config.yaml", "environment.json", "result.json", "status.json", "metrics.jsonl", "diagnostics.jsonl"
    for name in (*names, "train.log", "rollouts/rank0.jsonl"):
        (tmp_path / "bad" / name).unlink(missing_ok=True)
        HARM[harm](tmp_path / "bad" / name)
    rows = {row["name"]: row["status"] for row in run_rows([tmp_path])}
    assert rows == {"good": "failed", "bad": "unknown"}
    json.dumps(Overview(tmp_path / "bad").to_json(), allow_nan=False)


def test_the_table_of_runs_has_options_of_one_line_without_secrets(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [], "finished")
    lines = "lr: 1.0e-05\ntokens_per_pass: 8192\nhub_token: sesame\nproject_name: run\nrl_env_config: {level: 7}\n"
    run.config.write_text(lines)
    assert Overview(run.path).row()["options"] == {"lr": "1.0e-05", "tokens_per_pass": "8192"}


def test_a_run_without_held_out_cases_has_no_scores(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [], "finished")
    write_json(run.result, {"score_before": None, "score_after": None, "scores": {}})
    overview = Overview(run.path)
    assert (overview.to_json()["scores"], overview.row()["before"], overview.row()["change"]) == ({}, None, None)


# -- cases


def test_a_case_is_a_row_and_has_the_mean_of_its_first_and_of_its_last_group(tmp_path: Path) -> None:
    """Of training (step 1 and 4) and of scorings; another row has the same `case_idx`."""
    found = [(3, 1, "", 0.0), (3, 1, "", 1.0), (3, 4, "", 1.0), (3, 4, "", None), (8, 4, "", 0.25),
             (3, 0, "before_sampled", 0.0), (3, 4, "after_sampled", 1.0)]  # fmt: skip
    names = "row_number", "step", "eval_phase", "score"
    records = [record(case_idx=7, group=0, **dict(zip(names, values, strict=True))) for values in found]
    records[3]["error"] = {"kind": "raised"}
    rollouts = read(write_run(tmp_path, records))
    training, other, held_out = sorted(case_rows(rollouts), key=lambda row: (row["is_held_out"], row["case"]))
    assert (training["first"], training["last"]) == (0.5, 1.0)
    assert (held_out["first"], held_out["last"], other["case"], other["last"]) == (0.0, 1.0, "8", 0.25)
    assert [len(find(rollouts, Query(case=case))) for case in ("8", "7")] == [1, 7], "found by either"


def test_a_run_that_goes_on_again_has_no_score_after_training(tmp_path: Path) -> None:
    run = make_live(tmp_path / "run")
    write_json(run.result, {"score_before": 0.25, "score_after": 0.75, "scores": {}})
    found = Overview(run.path).scores["sampled"]
    assert (found["before"]["mean"], found["after"]) == (0.25, None)
    run.write_status("finished")
    run.result.write_text('{"score_before": 0.25, "score_after": 0.75}')
    assert Overview(run.path).scores["sampled"]["after"]["mean"] == 0.75
