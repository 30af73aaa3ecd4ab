"""Diagnostics of a training: what is measured of a batch, and what is reported while it runs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain import Result
from aitrain.environment.contract import ScoreResult
from aitrain.rollout.trajectory import Trajectory
from aitrain.runs.diagnosis import LINES_IN_A_ROW, findings_of
from aitrain.runs.run_folder import RunFolder
from aitrain.training.batch_diagnostics import batch_diagnostics, prompt_dependence, score_weights

DRAW = random.Random(0)


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        ([[[7, 8, 9]] * 4] * 4, 0.0),
        ([[[group % 2]] * 4 for group in range(4)], 2 / 3),
        ([[[1]] * 2, [[2]] * 5, [[3]]], 1.0),
        ([[[1]], [[2]]], None),
    ],
)
def test_how_far_answers_depend_on_their_prompts(groups: list[list[list[int]]], share: float | None) -> None:
    """Of groups of any size; not measured with single prompts or completions."""
    assert prompt_dependence(groups) == (None if share is None else pytest.approx(share))


Scored = list[list[tuple[float | None, dict[str, float]]]]


def scored(weights: dict[str, float], noise: float = 0.0) -> Scored:
    """Groups of episodes with a score that is a weighted sum of metrics, plus one for the group and noise."""
    made: Scored = []
    for group in range(4):
        metrics = [{name: DRAW.random() for name in weights} for _ in range(4)]
        sums = [group + sum(weights[name] * one[name] for name in weights) for one in metrics]
        made.append([(total + DRAW.gauss(0, noise), one) for total, one in zip(sums, metrics, strict=True)])
    return made


@pytest.mark.parametrize(
    ("groups", "weights"),
    [
        (scored({"right": 0.7, "style": 0.3, "seconds": 0.0}), {"right": 0.7, "style": 0.3, "seconds": 0.0}),
        (scored({"right": 0.5}) + scored({"style": 0.25}), {"right": 0.5, "style": 0.25}),
        (scored({"right": 0.7}, noise=1.0), {}),
        ([[(score, {**one, "copy": one["right"]}) for score, one in group] for group in scored({"right": 1.0})], {}),
        ([[(None, {"right": 1.0}), (0.5, {})]], {}),
    ],
)
def test_the_weights_of_a_weighted_sum_are_found_and_those_that_scores_do_not_show_are_left_out(
    groups: Scored, weights: dict[str, float]
) -> None:
    assert score_weights(groups) == pytest.approx(weights)


def episode(env: str, prompt: int, answer: int, score: float) -> Any:
    """What is measured of an episode."""
    trajectory = Trajectory(prompt_ids=[prompt], ids=[answer, 9], mask=[1, 0])
    result = ScoreResult(score, metrics={"right": score})
    return SimpleNamespace(case=SimpleNamespace(env=env), is_dropped=prompt < 0, trajectory=trajectory, result=result)


def test_several_environments_are_measured_apart_and_dropped_episodes_not_at_all() -> None:
    both = [episode(env, prompt, answer if env == "sums" else 5, score / 4)
            for env in ("sums", "poems") for prompt, answer in ((1, 1), (2, 2)) for score in range(4)]  # fmt: skip

    assert batch_diagnostics(both) == pytest.approx(
        {"prompt_dependence/sums": 1.0, "prompt_dependence/poems": 0.0, "score_weight/sums/right": 1.0,
         "score_weight/poems/right": 1.0}
    )  # fmt: skip
    assert batch_diagnostics([episode("", 1, 1, 0.5)] * 2 + [episode("", -1, 2, 0.5)] * 2) == {}


class Same:
    """All answers are worth the same."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(12)]

    def score_episode(self) -> float:
        return 0.0


def test_a_run_that_cannot_learn_says_so_while_it_runs_and_stops_itself_when_it_may(
    train: Callable[..., Result], capsys: pytest.CaptureFixture[str]
) -> None:
    steps = LINES_IN_A_ROW + 1
    result = train(Same(), max_steps=50, stop_when_flat=steps)

    assert capsys.readouterr().err.count("100% of the groups all completions score the same, at 0") == 1
    assert {"frac_reward_zero_std", "completions/clipped_ratio", "unscored", "entropy"} <= set(result.history[0])
    assert "prompt_dependence" in result.history[0]
    assert "zero_variance" in [finding.name for finding in findings_of(RunFolder(result.folder))]

    written = json.loads((result.folder / "result.json").read_text())
    assert result.status == written["status"] == "stopped"
    assert (result.steps, written["score_after"]) == (steps, 0.0)
    assert written["stopped_because"].startswith(f"in {steps} steps no group's scores differed")
    assert (result.folder / "checkpoints" / f"checkpoint-{steps}").exists()
