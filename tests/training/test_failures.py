"""Environments that fail, and episodes that are left out: the run goes on without them, says what happened, and leaves
nothing behind."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Generator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from aitrain import EnvironmentFailed, Result
from aitrain.engines.hf import HFEngine
from aitrain.runs.run_folder import RunFolder
from aitrain.training.algorithm import has_advantages
from tests.conftest import read_lines
from tests.environments.ill import Gone
from tests.environments.vowels import Vowels
from tests.training.conftest import Train, difference, rollouts
from tests.training.scripted_policy import scripted
from tests.training.scripted_run import Endless, Scripted, Unscored, early_letters, scripted_sample

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
    cases = len(ILLNESSES)
    options: dict[str, Any] = {
        "eval_cases": 0, "batch_size": 4 * cases, "rl_prompts_per_step": cases, "rl_check": False,
    }  # fmt: skip
    result = train(Plain(), **options, max_steps=1)

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
        assert line[f"failed/{kind}"] == pytest.approx(found / cases / 4)
    assert line["unscored"] == 0.25
    assert line["reward"] == pytest.approx(sum(SCORES.values()) / 3)
    with pytest.raises(EnvironmentFailed, match="Too few scores in 3 batches in a row"):
        train(Plain(), **options, max_steps=9, rl_max_failed=0.1)


# -- nothing works any more


def test_what_was_learned_before_the_environment_stopped_working_is_saved(train: Train, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"(?s)Too few scores in 3 batches in a row.*the board is gone"):
        train(Gone(calls=2 * 8), max_steps=20, project_name="gone", rl_check=False)

    folder = RunFolder(tmp_path / "runs" / "gone")
    result = json.loads(folder.result.read_text())
    assert (result["status"], result["steps"]) == ("failed", 4)
    assert [line["failed/raised"] for line in read_lines(folder.metrics) if "loss" in line] == [0.0] * 2 + [1.0] * 2
    assert (folder.model / "model.safetensors").exists()


class NoJudge(Gone):
    """Works in training, and for the held-out case except in some of its scores."""

    concurrent = True

    def __init__(self, *without: int) -> None:
        self.without, self.played = without, count()

    def score_episode(self, completion: str, case_idx: int) -> float:
        if case_idx < 0 and next(self.played) in self.without:
            raise RuntimeError("no judge")
        return len(completion) % 5 / 5


def test_an_evaluation_without_scores_is_skipped_and_the_run_goes_on(train: Train) -> None:
    """The first and the third one in training, and the one after it."""
    result = train(NoJudge(2, 5, 6), eval_strategy="steps", eval_steps=1, max_steps=4, rl_check=False)
    assert [line["step"] for line in result.history if "eval_score" in line] == [2]
    assert (result.steps, result.status, result.score_after, result.verdict) == (4, "finished", None, None)


# -- rows that are left out of the loss


PLAIN_STEPS = {
    "rl_num_generations": 4, "batch_size": 4, "optimizer": "sgd", "lr": 0.1, "max_grad_norm": 0, "rl_kl_coef": 0.1,
    "eval_cases": 0, "rl_max_turns": 2, "rl_max_new_tokens": 8, "epochs": 2, "max_steps": None, "scheduler": "constant",
}  # fmt: skip


class NoRoom(Scripted):
    """In every second case the environment says more than the context holds."""

    score_episode = None  # type: ignore[assignment]

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        reply = yield "y" * 5000 if case_idx % 2 else None
        return early_letters(reply)


def test_a_batch_whose_half_is_left_out_trains_like_the_other_half_alone(
    train: Train, small_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The KL term as well, from the second step on. Episodes that rl_max_turns ended do have an EOS at their end.
    Completions are written down: the same for a case whatever the batch. Two steps without momentum."""
    monkeypatch.setattr(HFEngine, "sample", scripted_sample)

    def run(kind: type[Scripted], cases: int = 2, **options: Any) -> Result:
        environment = kind()
        rows = environment.build_dataset(None)[:cases]
        vars(environment)["build_dataset"] = lambda tokenizer: rows
        return train(environment, **PLAIN_STEPS, **options, rl_loss_type="grpo", rl_prompts_per_step=cases)

    alone = run(Scripted, cases=1).model
    unscored = run(Unscored)
    masked = run(Endless, rl_mask_truncated_completions=True)
    dropped = run(NoRoom)
    counted = run(Endless)

    assert difference(alone, small_model) > 1e-4
    assert difference(alone, unscored.model) < 1e-6
    assert difference(alone, masked.model) < 1e-6
    assert difference(alone, dropped.model) < 1e-6
    assert difference(alone, counted.model) > 1e-4
    assert [line["unscored"] for line in unscored.history if "reward" in line] == [0.5] * 2
    assert [line["stopped/no_room"] for line in dropped.history if "reward" in line] == [0.5] * 2
    assert " ".join(capsys.readouterr().err.split()).count("Case 1 is dropped: its prompt has 5006 tokens") == 1
    assert [line["stopped/max_turns"] for line in masked.history if "reward" in line] == [0.5] * 2


class ScoredAtFirst(Vowels):
    """Has no scores from the third step on."""

    def score_episode(self, completion: str, case_idx: int) -> float | None:  # type: ignore[override]
        self.calls = getattr(self, "calls", 0) + 1
        return None if self.calls > 16 else self.calls / 16


def test_a_step_without_a_score_leaves_the_weights_as_they_are(train: Train) -> None:
    """Whatever momentum, weight decay and KL would do to them."""
    run = train(
        ScoredAtFirst(), max_steps=4, eval_cases=0, rl_kl_coef=0.5, weight_decay=0.1, save_strategy="steps",
        save_steps=1, save_total_limit=None,
    )  # fmt: skip
    at = {step: run.folder / "checkpoints" / f"checkpoint-{step}" for step in (1, 2, 4)}

    assert difference(at[1], at[2]) > 0
    assert difference(at[2], at[4]) == 0
    assert run.history[-1]["grad_norm"] == 0


# -- groups that teach nothing

NONE = math.nan


@pytest.mark.parametrize(
    ("scores", "left_out", "share"),
    [
        ([0.1, 0.1, 0.1, 0.1], [], 1.0),
        ([NONE, 0.7, 0.7, 0.7], [], 1.0),
        ([0.0, 1.0, 0.5, 0.5], [0, 1], 1.0),
        ([0.3, 0.3, 0.3, 0.3, 0.0, 0.3, 0.3, 0.3], [], 0.5),
        ([1e-7, 3e-7, 1e-7, 1e-7], [], 0.0),
    ],
)  # fmt: skip
def test_a_group_is_flat_where_no_episode_in_the_loss_has_an_advantage(
    scores: list[float], left_out: list[int], share: float
) -> None:
    rows = torch.tensor(scores)
    kept = ~rows.isnan()
    kept[left_out] = False

    assert has_advantages(rows, kept, 4).float().mean() == 1 - share
