"""What is proposed after a run, by what came of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aitrain.runs.run_folder import RunFolder, append_lines, write_json
from aitrain.ui.overview import Overview

SCORES = {"better": (0.1, 0.3), "worse": (-0.3, -0.1), "undetected": (-0.1, 0.1)}


def run(
    path: Path, verdict: str | None = "better", options: str = "rl_env: envs.arithmetic", **values: object
) -> RunFolder:
    """The folder of a run that has ended, with a checkpoint."""
    folder = RunFolder(path / "my run")
    (folder.checkpoints / "checkpoint-80").mkdir(parents=True)
    folder.config.write_text(options + "\n")
    folder.model.mkdir()
    folder.rollouts.mkdir()
    append_lines(folder.rollouts / "rank0.jsonl", [])
    scores: dict[str, object] = {}
    if verdict:
        low, high = SCORES[verdict]
        change = {
            "mean": (low + high) / 2,
            "low": low,
            "high": high,
            "count": 64,
            "p_value": 0.5 if verdict == "undetected" else 0.01,
        }
        scores = {"sampled": {"before": None, "after": None, "change": change}}
    result = {"status": "finished", "steps": 80, "score_after": 0.5, "eval_cases": 64, "scores": scores, **values}
    write_json(folder.result, result)
    write_json(folder.status, {"status": result["status"]})
    return folder


def commands(folder: RunFolder) -> list[str]:
    """The commands without the folder."""
    return [step["command"].replace(str(folder.path), "RUN") for step in Overview(folder.path).next_steps]


def test_a_better_model_is_to_be_talked_to_and_handed_over(tmp_path: Path) -> None:
    folder = run(tmp_path)
    assert Overview(folder.path).advice == ""
    assert commands(folder) == [
        "aitrain chat 'RUN'",
        "aitrain compare 'RUN'",
        "aitrain view 'RUN'",
        "aitrain eval 'RUN' --samples 4",
        "aitrain export 'RUN'",
        "aitrain grpo --config 'RUN/config.yaml' --resume --max-steps 160",
    ]


def test_more_steps_are_advised_where_no_difference_is_detected(tmp_path: Path) -> None:
    assert "More steps" in Overview(run(tmp_path, "undetected").path).advice


@pytest.mark.parametrize(
    ("because", "options", "end"),
    [
        ("Ctrl-C", "", "--resume"),
        ("... (--patience 3)", "patience: 3", "--resume --patience 6"),
    ],
)
def test_a_run_that_stopped_is_continued_by_the_command_that_goes_on(
    because: str, options: str, end: str, tmp_path: Path
) -> None:
    folder = run(tmp_path, options=f"rl_env: envs.arithmetic\n{options}", status="stopped", stopped_because=because)
    assert Overview(folder.path).continuing() == f"aitrain grpo --config '{folder.config}' {end}"


def test_there_are_no_commands_for_what_cannot_be_done(tmp_path: Path) -> None:
    """A run of a notebook, without an environment in its config.yaml, whose files were deleted to save space; an
    interrupted one, a running one, an eval; and a comparison without held-out cases."""
    assert "compare" not in " ".join(commands(run(tmp_path / "no cases", None)))
    folder = run(tmp_path, "better", "lr: 1.0e-05")
    assert "grpo" not in " ".join(commands(folder))
    assert Overview(folder.path).continuing() == ""
    shutil.rmtree(folder.rollouts)
    folder.model.rmdir()
    assert commands(folder) == []
    for status, values in (("stopped", {"score_after": None}), ("running", {}), ("finished", {"job": "eval"})):
        other = run(tmp_path / f"{status} {len(values)}", status=status, scores={}, **values)
        assert (Overview(other.path).next_steps, Overview(other.path).advice) == ([], "")
