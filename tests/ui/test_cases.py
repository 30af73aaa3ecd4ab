"""Cases are rows: what the environment calls them may repeat, and is missing in no list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder
from aitrain.ui.cases import case_rows
from aitrain.ui.episodes import Query, find
from aitrain.ui.summary import held_out_curve, scores
from aitrain.ui.transcript import episodes
from tests.ui.conftest import record, write_run


def read(folder: Path, records: list[dict[str, Any]]) -> RolloutIndex:
    rollouts = RolloutIndex(write_run(folder, records) / "rollouts")
    rollouts.refresh()
    return rollouts


def scored(row: int, when: str, score: float | None, **more: Any) -> dict[str, Any]:
    return record(row_number=row, case_idx=7, eval_phase=when, score=score, step=4, weight_version=4, **more)


def test_rows_that_share_a_case_idx_are_cases_of_their_own(tmp_path: Path) -> None:
    rollouts = read(tmp_path, [record(row_number=row, case_idx=7, score=score) for row, score in ((3, 1.0), (4, 0.0))])
    assert [(row.case, row.case_idx, row.last) for row in case_rows(rollouts)] == [("3", "7", 1.0), ("4", "7", 0.0)]


def test_a_case_is_found_by_its_row_or_else_by_its_case_idx(tmp_path: Path) -> None:
    rollouts = read(tmp_path, [record(row_number=row, case_idx=idx) for row, idx in ((3, "a"), (4, "a"), (5, 3))])
    found = {case: find(rollouts, Query(case=case)).numbers for case in ("3", "a", "b")}
    assert found == {"3": [0], "a": [0, 1], "b": []}


def test_the_terminal_names_both_where_they_differ(tmp_path: Path) -> None:
    rollouts = read(tmp_path, [record(row_number=3, case_idx="a"), record(row_number=4, case_idx=4, group=1)])
    console = Console(width=100)
    with console.capture() as captured:
        console.print(*episodes(rollouts, [0, 1]))
    assert "case 3 (case_idx a)" in captured.get()
    assert "case 4 " in captured.get()


def test_records_of_older_runs_are_known_by_their_case_idx(tmp_path: Path) -> None:
    rollouts = read(tmp_path, [record(case_idx=2), record(case_idx=2), record(case_idx=5)])
    assert [(row.case, row.episodes) for row in case_rows(rollouts)] == [("2", 2), ("5", 1)]


def test_scores_are_paired_by_row_and_before_is_of_the_cases_that_are_reported(tmp_path: Path) -> None:
    before = [scored(row, "before_sampled", score) for row, score in ((1, 0.0), (2, 1.0), (3, 1.0))]
    after = [scored(row, "after_sampled", score) for row, score in ((1, 1.0), (2, 1.0))]
    found = scores(RunFolder(tmp_path), read(tmp_path, [*before, *after]))["sampled"]
    assert (found["before"]["mean"], found["after"]["mean"], found["change"]["mean"]) == (0.5, 1.0, 0.5)
    assert found["before"]["count"] == found["change"]["count"] == 2


def test_several_samples_of_a_case_count_as_one(tmp_path: Path) -> None:
    samples = [scored(row, "after_sampled", score, sample=k) for row in (1, 2) for k, score in enumerate((0.0, 1.0))]
    (tmp_path / "config.yaml").write_text("eval_samples: 2\n")
    rollouts = read(tmp_path, samples)
    found = scores(RunFolder(tmp_path), rollouts)
    assert (found["sampled"]["after"]["mean"], found["sampled"]["after"]["count"]) == (0.5, 2)
    assert found["pass@2"]["after"]["mean"] == 1.0
    assert held_out_curve(RunFolder(tmp_path), rollouts)[0]["sampled"]["count"] == 2


def test_scores_of_another_range_are_read_with_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("rl_score_range: -5,5\n")
    found = scores(RunFolder(tmp_path), read(tmp_path, [scored(row, "after_sampled", -5.0) for row in range(20)]))
    assert found["sampled"]["after"]["low"] == -5.0
    assert -5.0 < found["sampled"]["after"]["high"] < -3.0
