"""Episodes without a score, and truncated ones that are masked, are in the records of a run and not in its training."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aitrain import Result
from aitrain.engines.hf import HFEngine
from aitrain.rollout.engine import Trajectory
from aitrain.rollout.episode import STOPS, Episode
from aitrain.training.algorithm import zero_variance_share
from tests.environments.vowels import Vowels
from tests.training.conftest import difference
from tests.training.scripted_run import Endless, Scripted, Unscored, scripted_sample

Train = Callable[..., Result]

PLAIN_STEPS = {
    "rl_num_generations": 4, "batch_size": 4, "optimizer": "sgd", "lr": 0.1, "max_grad_norm": 0, "rl_kl_coef": 0.1,
    "eval_cases": 0, "rl_max_turns": 2, "rl_max_new_tokens": 8, "epochs": 2, "max_steps": None, "scheduler": "constant",
}  # fmt: skip


class NoRoom(Scripted):
    """In every second case the environment says more than the context holds."""

    score_episode = None  # type: ignore[assignment]

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        reply = yield "y" * 5000 if case_idx % 2 else None
        return sum(letter < "n" for letter in reply) / max(1, len(reply))


@pytest.fixture
def scripted(train: Train, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Runs whose completions are written down: the same for a case whatever the batch. Two steps without momentum."""
    monkeypatch.setattr(HFEngine, "sample", scripted_sample)
    return lambda environment, **options: train(environment, **PLAIN_STEPS, **options)


def of_cases(kind: type[Scripted], count: int) -> Scripted:
    environment = kind()
    rows = environment.build_dataset(None)[:count]
    vars(environment)["build_dataset"] = lambda tokenizer: rows
    return environment


def test_a_batch_whose_half_is_left_out_trains_like_the_other_half_alone(
    scripted: Train, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The KL term as well, from the second step on. Episodes that rl_max_turns ended do have an EOS at their end."""
    alone = scripted(of_cases(Scripted, 1), rl_prompts_per_step=1, project_name="alone").model
    both = {"rl_prompts_per_step": 2, "rl_loss_type": "grpo"}
    unscored = scripted(of_cases(Unscored, 2), **both, project_name="unscored")
    masked = scripted(of_cases(Endless, 2), **both, rl_mask_truncated_completions=True, project_name="masked")
    dropped = scripted(of_cases(NoRoom, 2), **both, project_name="dropped")
    counted = scripted(of_cases(Endless, 2), **both, project_name="counted")

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


@pytest.mark.parametrize("stop", STOPS)
def test_a_truncated_episode_is_one_that_a_limit_of_ours_ended(stop: str) -> None:
    """By what ended it, and not by its last token, which may be the environment's."""
    failed = SimpleNamespace(failure=SimpleNamespace(kind="timed_out" if stop == "env_timeout" else "raised"))
    scored: Any = failed if stop.startswith("env_") else SimpleNamespace(failure=None)
    episode = Episode(SimpleNamespace(), Trajectory(stop=stop), result=scored)  # type: ignore[arg-type]

    assert episode.is_truncated == (stop in ("max_tokens", "max_turns", "truncated"))


# -- groups that teach nothing

NONE = math.nan


@pytest.mark.parametrize(
    ("scores", "left_out", "share"),
    [
        ([0.1, 0.1, 0.1, 0.1], [], 1.0),
        ([NONE, NONE, NONE, 0.7], [], 1.0),
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

    assert zero_variance_share(rows, kept, 4) == share
