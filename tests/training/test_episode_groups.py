"""Groups of episodes on the real trainer: scored together, dropped together, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from aitrain import Result, TrainConfig
from aitrain.environment.dataset import Cases
from aitrain.environment.failure_count import FailureCount
from aitrain.environment.runner import start_runner
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.episode import Rollout
from aitrain.rollout.limits import Limits
from aitrain.training.evaluation import EvalPhase, EvalPlan, evaluate
from aitrain.training.policy_rollouts import PolicyRollouts
from tests.environments.grouped import Ranked
from tests.rollout.scripted import END, Letters
from tests.rollout.scripted import Scripted as ScriptedEngine
from tests.training.conftest import rollouts

Train = Callable[..., Result]


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
