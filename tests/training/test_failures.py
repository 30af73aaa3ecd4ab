"""Environments that fail: the run goes on without those episodes, says what happened, and leaves nothing behind."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from aitrain import EnvironmentFailed, Result
from aitrain.engines.hf import HFEngine
from aitrain.runs.run_folder import RunFolder, read_lines
from aitrain.training import held_out_scoring
from aitrain.training.evaluation import EvalPhase, EvalScores, evaluate
from tests.environments.ill import Gone
from tests.training.conftest import rollouts
from tests.training.scripted_policy import scripted

Train = Callable[..., Result]
# -- one episode of each group

ANSWERS = ["abcz", "ayzz", "ill", "zzzz"]
SCORES = {"abcz": 0.75, "ayzz": 0.25, "zzzz": 0.0}


async def later() -> float:
    raise ValueError("no such word")


ILLNESSES: list[tuple[Any, str | None]] = [(later, "raised"), (lambda: None, None), (lambda: 1e30, "out_of_range")]
"""What happens in one episode of each group, and which kind of failure that is; test_scoring.py has all kinds."""


class Plain:
    """Each case has its illness."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}: "} for number in range(len(ILLNESSES))]

    def score_episode(self, completion: str, case_idx: int) -> Any:
        if completion != "ill":
            return SCORES[completion]
        return ILLNESSES[case_idx][0]()


def test_an_episode_that_has_no_score_is_left_out_of_its_group_and_counted_by_kind(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third episode of each group has none; the others' advantages are those of a group of three."""
    monkeypatch.setattr(HFEngine, "sample", scripted(lambda position, _: ANSWERS[position % 4] + "<|im_end|>"))
    count = len(ILLNESSES)
    result = train(
        Plain(), max_steps=1, eval_cases=0, batch_size=4 * count, rl_prompts_per_step=count, rl_check=False,
        rl_env_retries=0,
    )  # fmt: skip

    scores = torch.tensor(list(SCORES.values()))
    advantages = ((scores - scores.mean()) / (scores.std() + 1e-4)).tolist()
    for number, (_, kind) in enumerate(ILLNESSES):
        records = [record for record in rollouts(result) if record["case_idx"] == number]
        assert [record["completion"] for record in records] == ANSWERS
        ill = records.pop(2)
        assert (ill["score"], ill["advantage"], ill["stop"]) == (None, 0.0, "env_error" if kind else "done")
        assert (ill["error"] or {}).get("kind") == kind
        assert [record["score"] for record in records] == list(SCORES.values())
        assert [record["advantage"] for record in records] == pytest.approx(advantages, abs=1e-5)
    (line,) = result.history
    for kind, found in Counter(kind for _, kind in ILLNESSES if kind).items():
        assert line[f"failed/{kind}"] == pytest.approx(found / count / 4)
    assert line["unscored"] == 0.25
    assert line["reward"] == pytest.approx(sum(SCORES.values()) / 3)


# -- nothing works any more


def test_what_was_learned_before_the_environment_stopped_working_is_saved(train: Train, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"(?s)every episode of 3 batches in a row.*the board is gone"):
        train(Gone(calls=2 * 8), max_steps=20, project_name="gone", rl_check=False)

    folder = RunFolder(tmp_path / "runs" / "gone")
    result = json.loads(folder.result.read_text())
    assert (result["status"], result["steps"]) == ("failed", 4)
    assert [line["failed/raised"] for line in read_lines(folder.metrics) if "loss" in line] == [0.0] * 2 + [1.0] * 2
    assert (folder.model / "model.safetensors").exists()


def test_an_environment_that_fails_on_the_held_out_cases_is_refused_before_training(
    train: Train, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFailed, match="failed on all 1 held-out cases"):
        train(Gone(calls=4 * 8, held_out=False), project_name="gone")
    assert not (tmp_path / "runs" / "gone").exists()


class NoJudge(Gone):
    """Works in training, and for the held-out case except in some evaluations."""

    def __init__(self, evaluations: list[str], without: Collection[str]) -> None:
        self.evaluations, self.without = evaluations, without

    def score_episode(self, completion: str, case_idx: int) -> float:
        if case_idx < 0 and self.evaluations[-1] in self.without:
            raise RuntimeError("no judge")
        return len(completion) % 5 / 5


def test_an_evaluation_without_scores_is_skipped_and_the_run_goes_on(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[str] = []

    def counted(rollouts: Any, plan: Any, phase: EvalPhase, write: Any) -> EvalScores:
        played.append(phase.name)
        return evaluate(rollouts, plan, phase, write)

    monkeypatch.setattr(held_out_scoring, "evaluate", counted)
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}
    result = train(NoJudge(played, {"step1", "step3", "after"}), **options)
    assert [line["step"] for line in result.history if "eval_score" in line] == [2]
    assert (result.steps, result.status, result.score_after, result.verdict) == (4, "finished", None, None)
    assert played == ["before", "step1", "step2", "step3", "after"]
