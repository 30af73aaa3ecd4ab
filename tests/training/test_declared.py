"""Runs of environments that declare what they need: what takes effect, what is written, and how they are resumed."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain import EnvRequirements, Result, Score
from aitrain.options.reading import read_file
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import read_lines
from tests.environments.vowels import Vowels
from tests.training.test_processes import Command, command

__all__ = ["command"]

Train = Callable[..., Result]
SAVED = {
    "save_strategy": "steps",
    "save_steps": 1,
    "project_name": "run",
    "eval_cases": 0,
    "max_steps": 2,
    "save_total_limit": 9,
}


class Declares(Vowels):
    requirements = EnvRequirements(isolation="process", max_new_tokens=3, score_range=(-1, 1), max_turns=5)

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def score_episode(self, completion: str, case_idx: int) -> Score:  # type: ignore[override]
        return Score(-len(completion) % 5 / 5 - 1, {"elsewhere": os.getpid() != self.home})


def options_of(folder: Path) -> dict[str, Any]:
    return read_file(TrainConfig, folder / "config.yaml")


def test_what_the_environment_declares_takes_effect_and_is_written_down(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(Declares(), rl_max_new_tokens=4, **SAVED)

    records = [*read_lines(result.folder / "rollouts" / "rank0.jsonl")]
    assert {record["metrics"]["elsewhere"] for record in records} == {1.0}
    assert all(record["score"] < 0 for record in records)
    assert max(record["tokens"] for record in records) == 4
    options = options_of(result.folder)
    assert [options[name] for name in ("rl_env_isolation", "rl_max_new_tokens", "rl_score_range", "rl_max_turns")] == [
        "process", 4, "-1,1", 5
    ]  # fmt: skip
    facts = json.loads((result.folder / "environment.json").read_text())
    assert facts["requires"] == Declares.requirements.as_options()
    note = 'Declares requires rl_env_isolation="process", rl_max_turns=5, rl_score_range="-1,1".'
    assert " ".join(capsys.readouterr().err.split()).count(note) == 1


@pytest.mark.slow
def test_a_run_without_prompts_in_processes_is_resumed_with_the_scores_that_are_on_record(
    train: Train, tmp_path: Path
) -> None:
    options = {**SAVED, "eval_cases": 2, "rl_env_isolation": "process"}
    first = train(Counted(tmp_path), **options)
    assert len(list(tmp_path.glob("held-*"))) == 2 * 4  # sampled and greedy, before and after
    resumed = train(
        Counted(tmp_path), **options, resume_from_checkpoint=str(first.folder / "checkpoints" / "checkpoint-1")
    )

    assert len(list(tmp_path.glob("held-*"))) == 2 * 6  # those before training were not played again
    assert (resumed.score_before, resumed.greedy_before) == (first.score_before, first.greedy_before)
    records = [*read_lines(resumed.folder / "rollouts" / "rank0.jsonl")]
    assert {(record["prompt"] == [], record["messages"][0]["role"]) for record in records} == {(True, "user")}


class Counted:
    """Speaks first; leaves a file for each held-out episode."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"word": f"word {number}"} for number in range(12)]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return [{"word": f"held {number}"} for number in range(2)]

    def start(self, word: str) -> Any:
        if word.startswith("held"):
            (self.notes / f"held-{uuid.uuid4()}").touch()
        return Says(word)


class Says:
    def __init__(self, word: str) -> None:
        self.word, self.said = word, ""

    def opening(self) -> str:
        return f"Say {self.word}."

    def step(self, reply: str) -> None:
        self.said = reply

    def score(self) -> float:
        return len(self.said) % 5 / 5


@pytest.mark.slow
def test_the_command_resumes_with_what_the_environment_declares(command: Command) -> None:
    """By its own flags again, and by the config.yaml of the run, in which the declared options are written."""
    flags = ["--save-strategy=steps", "--save-steps=1", "--eval-cases=0", "--max-steps=2", "--save-total-limit=9"]
    resume = "--resume-from-checkpoint=run/checkpoints/checkpoint-1"
    file = f"--rl-env={Path(__file__).parents[1] / 'environments' / 'grouped.py'}:Moves"
    first = command.run("Shared", file, *flags)
    assert first.returncode == 0, first.stderr
    assert "Moves requires --rl-max-turns 3, --rl-score-range -1,1." in " ".join(first.stderr.split())
    options = options_of(command.folder / "run")
    assert (options["rl_max_turns"], options["rl_score_range"], options["rl_max_new_tokens"]) == (3, "-1,1", 4)

    again = command.run("Shared", file, *flags, resume)
    assert again.returncode == 0, again.stderr
    config = command.folder / "run" / "config.yaml"
    third = command.run("Shared", file, "--config", str(config), resume)
    assert third.returncode == 0, third.stderr
    assert "requires" not in third.stderr
    assert json.loads((command.folder / "run" / "result.json").read_text())["steps"] == 2

    refused = command.run("Shared", file, *flags, resume, "--rl-score-range=any")
    assert (refused.returncode, "rl_score_range: -1,1 -> any" in refused.stderr) == (2, True), refused.stderr
