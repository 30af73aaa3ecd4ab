"""Groups of episodes on the real trainer: scored together, dropped together, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from aitrain import Result, TrainConfig
from aitrain.engines.hf import HFEngine
from aitrain.environment.dataset import Cases
from aitrain.environment.failure_count import FailureCount
from aitrain.environment.runner import start_runner
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.episode import Rollout
from aitrain.rollout.limits import Limits
from aitrain.training.evaluation import EvalPhase, EvalPlan, RecordedScores, evaluate
from aitrain.training.policy_rollouts import PolicyRollouts
from tests.environments.grouped import Ranked
from tests.rollout.scripted import END, Letters
from tests.rollout.scripted import Scripted as ScriptedEngine
from tests.training.conftest import difference, rollouts
from tests.training.scripted_run import Scripted, scripted_sample
from tests.training.test_left_out import PLAIN_STEPS, of_cases

Train = Callable[..., Result]


def steps(result: Result) -> list[dict[str, Any]]:
    return [line for line in result.history if "reward" in line]


# -- dropped cases


class NoRoom(Scripted):
    """In every second case the environment says more than the context holds."""

    score_episode = None  # type: ignore[assignment]

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        reply = yield "y" * 5000 if case_idx % 2 else None
        return sum(letter < "n" for letter in reply) / max(1, len(reply))


UNLIKE = ("step_time", "elapsed", "seconds", "tokens_per_second", "num_tokens", "memory", "stopped/no_room", "time/")
"""Metrics that differ: times, TRL's count of tokens, which has one for each dropped prompt, and the share of those."""


def test_a_case_without_room_is_as_if_it_were_not_in_the_batch(
    train: Train, small_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights and metrics are those of the other case alone, but for the share of dropped episodes."""
    monkeypatch.setattr(HFEngine, "sample", scripted_sample)
    alone = train(of_cases(NoRoom, 1), **PLAIN_STEPS, rl_prompts_per_step=1, project_name="alone")
    both = train(of_cases(NoRoom, 2), **PLAIN_STEPS, rl_prompts_per_step=2, rl_loss_type="grpo", project_name="both")

    assert difference(alone.model, small_model) > 1e-4
    assert difference(alone.model, both.model) < 1e-6
    for one, two in zip(steps(alone), steps(both), strict=True):
        assert (one["stopped/no_room"], two["stopped/no_room"]) == (0.0, 0.5)
        names = [name for name in one if not name.startswith(UNLIKE)]
        assert {"reward", "entropy", "completions/mean_length", "frac_reward_zero_std", "turns"} <= {*names}
        assert [two[name] for name in names] == pytest.approx([one[name] for name in names], rel=1e-5, abs=1e-6)
    assert " ".join(capsys.readouterr().err.split()).count("Case 1 is dropped: its prompt has 5006 tokens") == 1
    dropped = [record for record in rollouts(both) if record["stop"] == "no_room"]
    assert [(record["score"], record["error"], record["case_idx"]) for record in dropped] == [(None, None, 1)] * 12


# -- groups in an evaluation


class Compared:
    """Scores an answer by its place in the group."""

    def __init__(self) -> None:
        self.groups: list[list[str]] = []

    def score_episode(self, completion: str) -> float | None:
        return None

    def score_group(self, texts: list[str], scores: list[float | None]) -> list[float]:
        assert scores == [None] * len(texts)
        self.groups.append(texts)
        return [place / len(texts) for place, _ in enumerate(texts)]


def evaluated(environment: Any, engine: ScriptedEngine, plan: EvalPlan) -> tuple[Any, list[Any]]:
    written = list[Any]()
    rollout = Rollout(start_runner(environment, TrainConfig()), engine, ChatFormat(Letters()), Limits(9, 99), END)
    played = PolicyRollouts(rollout, Accelerator(cpu=True), 0, print, FailureCount(), nullcontext, lambda: 0)
    with closing(rollout.runner), closing(played):
        return evaluate(played, plan, EvalPhase("eval", 0, 0), written.extend), written


def test_the_samples_of_a_held_out_case_are_a_group_and_the_greedy_answer_is_one_of_its_own() -> None:
    environment = Compared()
    plan = EvalPlan(Cases([{"prompt": f"{n}?"} for n in range(2)], range(2)), samples=4, batch_size=3)
    found, written = evaluated(environment, ScriptedEngine(lambda text: f"{text[0]}$"), plan)

    assert found.sampled == {"0": [0.0, 0.25, 0.5, 0.75], "1": [0.0, 0.25, 0.5, 0.75]}
    assert found.greedy == {"0": [0.0], "1": [0.0]}
    assert environment.groups == [["0"] * 4, ["1"] * 4, ["0"], ["1"]]
    assert [record.score for record in written[:4]] == [0.0, 0.25, 0.5, 0.75]


def test_a_group_of_which_samples_are_missing_on_record_is_played_again() -> None:
    environment = Compared()
    recorded: RecordedScores = {"sampled": {(0, 0): 0.9, (1, 0): 0.9, (1, 1): 0.8}}
    plan = EvalPlan(Cases([{"prompt": f"{n}?"} for n in range(2)], range(2)), samples=2, recorded=recorded)
    found, _ = evaluated(environment, ScriptedEngine(lambda text: f"{text[0]}$"), plan)

    assert found.sampled == {"1": [0.9, 0.8], "0": [0.0, 0.5]}
    assert environment.groups[0] == ["0", "0"]


# -- real trainings


def test_a_group_is_scored_together_in_training_and_in_evaluation(train: Train, tmp_path: Path) -> None:
    """And a case without room is not scored at all; the environment is closed once."""
    result = train(
        Ranked(str(tmp_path)), max_steps=2, rl_num_generations=4, rl_prompts_per_step=5, eval_samples=3,
        rl_max_new_tokens=5,
    )  # fmt: skip

    sizes = {None: 4, "before_sampled": 3, "before_greedy": 1, "after_sampled": 3, "after_greedy": 1}
    for phase, size in sizes.items():
        records = rollouts(result, phase)
        assert {record["case_idx"] % 6 for record in records if record["stop"] == "no_room"} <= {2}
        assert {record["metrics"]["size"] for record in records if record["stop"] != "no_room"} == {size}
    assert any(record["advantage"] for record in rollouts(result))
    assert [path.name.startswith("closed-by-0-") for path in tmp_path.glob("closed-*")] == [True]
