"""Findings of the diagnostics on the page of a run and in `aitrain show`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import append_lines
from aitrain.ui.page import self_contained
from aitrain.ui.report_writer import page_data
from aitrain.ui.transcript import overview
from tests.ui.conftest import record
from tests.ui.made_runs import make_run

TEXT = "The component <b>style\x1b[31m</b> dominates the score."


def test_the_page_and_the_terminal_show_findings_with_control_characters_and_tags_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [record()], "finished", rewards=[0.1, 0.2])
    append_lines(run.diagnostics, [{"name": "component", "step": 2, "text": TEXT}])
    rollouts = RolloutIndex(run.rollouts)
    rollouts.refresh()
    data, console = page_data(run, rollouts), Console(width=200)
    with console.capture() as captured:
        console.print(*overview(run.path, rollouts, console))

    assert data["summary"]["findings"] == [{"name": "component", "step": 2, "text": TEXT}]  # type: ignore[index]
    assert "<b>style" not in self_contained(data)
    assert "step 2: The component <b>style" in captured.get()
    assert "\x1b[31m" not in captured.get()


def test_a_run_without_findings_shows_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [record()], "finished", rewards=[0.1, 0.2])
    rollouts = RolloutIndex(run.rollouts)

    assert page_data(run, rollouts)["summary"]["findings"] == []  # type: ignore[index]
