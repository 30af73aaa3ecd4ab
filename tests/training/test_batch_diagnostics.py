"""What is measured of a batch: how far completions depend on their prompt, and the weights of components."""

from __future__ import annotations

import random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain.environment.score_parsing import ScoreResult
from aitrain.rollout.trajectory import Trajectory
from aitrain.training.batch_diagnostics import batch_diagnostics, prompt_dependence, score_weights

DRAW = random.Random(0)


def sampled(*, mark: int | None, groups: int = 4, members: int = 4) -> list[list[list[int]]]:
    """Completions of random tokens; each of group g also has the token 1000 + g % mark."""
    marks = [[] if mark is None else [1000 + group % mark] * 2 for group in range(groups)]
    return [[DRAW.choices(range(30), k=12) + own for _ in range(members)] for own in marks]


def test_completions_that_show_their_prompt_are_told_apart_and_others_are_not() -> None:
    assert fmean(prompt_dependence(sampled(mark=4)) or 0.0 for _ in range(20)) > 0.5
    assert abs(fmean(prompt_dependence(sampled(mark=None)) or 0.0 for _ in range(200))) < 0.05
    assert abs(fmean(prompt_dependence(sampled(mark=None, groups=2)) or 0.0 for _ in range(400))) < 0.08


def test_prompts_with_the_same_answer_are_not_told_apart() -> None:
    assert prompt_dependence([[[7, 8, 9]] * 4] * 4) == 0.0
    assert prompt_dependence([[[group % 2]] * 4 for group in range(4)]) == pytest.approx(2 / 3)
    assert prompt_dependence([[[group]] * 4 for group in range(4)]) == 1.0


def test_empty_completions_depend_on_nothing_and_single_prompts_or_completions_are_not_measured() -> None:
    assert prompt_dependence([[[], []], [[], []]]) == 0.0
    assert prompt_dependence([[[1], [2], [3]]]) is None
    assert prompt_dependence([[[1]], [[2]]]) is None
    assert prompt_dependence([]) is None


def test_groups_of_different_sizes_are_compared_with_as_many_completions_each() -> None:
    assert prompt_dependence([[[1]] * 2, [[2]] * 5, [[3]]]) == 1.0


Scored = list[list[tuple[float | None, dict[str, float]]]]


def scored(weights: dict[str, float], groups: int = 4, noise: float = 0.0) -> Scored:
    """Groups of episodes with a score that is a weighted sum of metrics, plus one for the group and noise."""
    made: Scored = []
    for group in range(groups):
        metrics = [{name: DRAW.random() for name in weights} for _ in range(4)]
        sums = [group + sum(weights[name] * one[name] for name in weights) for one in metrics]
        made.append([(total + DRAW.gauss(0, noise), one) for total, one in zip(sums, metrics, strict=True)])
    return made


def test_the_weights_of_a_weighted_sum_are_found() -> None:
    assert score_weights(scored({"right": 0.7, "style": 0.3, "seconds": 0.0})) == pytest.approx(
        {"right": 0.7, "style": 0.3, "seconds": 0.0}
    )


def test_weights_that_the_scores_do_not_show_are_left_out() -> None:
    assert score_weights(scored({"right": 0.7}, noise=1.0)) == {}
    assert score_weights([[(None, {"right": 1.0}), (0.5, {})]]) == {}
    assert score_weights([]) == {}
    twice = [[(one["right"], {**one, "copy": one["right"]}) for _, one in group] for group in scored({"right": 1.0})]
    assert score_weights(twice) == {}
    constant = [[(one["right"], {**one, "format": 1.0}) for _, one in group] for group in scored({"right": 1.0})]
    assert score_weights(constant) == pytest.approx({"right": 1.0})


def test_episodes_with_different_metrics_are_measured_apart() -> None:
    assert score_weights(scored({"right": 0.5}) + scored({"style": 0.25})) == pytest.approx(
        {"right": 0.5, "style": 0.25}
    )


def episode(env: str, prompt: int, answer: int, score: float) -> Any:
    """What is measured of an episode."""
    trajectory = Trajectory(prompt_ids=[prompt], ids=[answer, 9], mask=[1, 0])
    result = ScoreResult(score, metrics={"right": score})
    return SimpleNamespace(case=SimpleNamespace(env=env), is_dropped=prompt < 0, trajectory=trajectory, result=result)


def test_several_environments_are_measured_apart_and_dropped_episodes_not_at_all() -> None:
    both = [episode(env, prompt, answer if env == "sums" else 5, score / 4)
            for env in ("sums", "poems") for prompt, answer in ((1, 1), (2, 2)) for score in range(4)]  # fmt: skip

    assert batch_diagnostics(both) == {
        "prompt_dependence/sums": 1.0,
        "prompt_dependence/poems": 0.0,
        "score_weight/sums/right": pytest.approx(1.0),
        "score_weight/poems/right": pytest.approx(1.0),
    }
    assert batch_diagnostics([episode("", 1, 1, 0.5)] * 2 + [episode("", -1, 2, 0.5)] * 2) == {}
    assert set(batch_diagnostics([episode("", 1, 1, 0.5)] * 2 + [episode("", 2, 2, 0.5)] * 2)) == {"prompt_dependence"}
