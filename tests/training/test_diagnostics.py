"""Alarms: one line for what lasts, none for a bad batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain import Result
from aitrain.training.diagnostics import (
    LINES_IN_A_ROW,
    DiagnosticsCallback,
    DiagnosticsState,
    RatioAdvice,
    common_diagnostics,
)
from tests.environments.vowels import Vowels

FINE = {
    "reward": 0.5, "frac_reward_zero_std": 0.25, "completions/clipped_ratio": 0.1, "unscored": 0.0, "entropy": 2.0,
    "sampling/importance_sampling_ratio/mean": 0.9,
}  # fmt: skip

BAD = [
    ({"frac_reward_zero_std": 1.0, "reward": 0.0}, "0.50 in the first step, so the policy has become worse", "--lr"),
    ({"frac_reward_zero_std": 0.8, "reward": 0.4}, "80% of the groups", "--rl-temperature"),
    ({"frac_reward_zero_std": 0.9, "unscored": 0.2}, "or fewer than two have a score", "--stop-when-flat"),
    ({"completions/clipped_ratio": 0.75}, "75% of the episodes end with an answer", "--rl-max-new-tokens"),
    ({"unscored": 0.3}, "30% of the episodes have no score", "--rl-env-timeout"),
    ({"entropy": 0.01}, "entropy has collapsed to 0.010", "--rl-kl-coef"),
]

RATIO = "sampling/importance_sampling_ratio/mean"
GAP = "sampling/sampling_logp_difference/mean"


def told(*lines: dict[str, float], bounds: tuple[float, float] | None = (0.0, 1.0)) -> list[str]:
    state = DiagnosticsState(common_diagnostics(bounds))
    return [advice for line in lines for advice in state.update({**FINE, **line})]


@pytest.mark.parametrize(("line", "meaning", "option"), BAD)
def test_what_lasts_is_told_once_with_an_option_to_change(line: dict[str, float], meaning: str, option: str) -> None:
    (advice,) = told({}, *[line] * (3 * LINES_IN_A_ROW))

    assert meaning in advice
    assert option in advice
    assert "\n" not in advice


@pytest.mark.parametrize(
    ("cause", "line", "meaning", "to_do"),
    [
        (RatioAdvice(), {GAP: 0.01, "completions/mean_length": 900.0}, "a product over 900 tokens", "token_truncate"),
        (RatioAdvice(), {GAP: 0.8}, "differ by 0.80 on average", "--dtype"),
        (RatioAdvice(by_sequence=False), {GAP: 0.05}, "vLLM has other weights", "--dtype"),
        (
            RatioAdvice(flags="--rl-top-k 50"),
            {GAP: 0.12, "sampling/logprob_shift/mean": -0.11},
            "before --rl-top-k 50",
            "--logprobs-mode processed_logprobs",
        ),
        (
            RatioAdvice(flags="--rl-top-k 50"),
            {GAP: 0.9, "sampling/logprob_shift/mean": -0.11},
            "differ by 0.90",
            "--dtype",
        ),
    ],
    ids=["long", "weights", "weights, by token", "truncation", "weights, not truncation"],
)
def test_a_small_importance_ratio_is_explained_by_what_is_known(
    cause: RatioAdvice, line: dict[str, float], meaning: str, to_do: str
) -> None:
    said: list[str] = []
    callback = DiagnosticsCallback(said.append, cause)
    for _ in range(LINES_IN_A_ROW + 2):
        callback.on_log(None, SimpleNamespace(is_world_process_zero=True), None, {**FINE, RATIO: 0.2, **line})

    (advice,) = said
    assert "importance ratio between vLLM and the trainer is 0.20" in advice
    assert meaning in advice
    assert to_do in advice
    assert "\n" not in advice


@pytest.mark.parametrize("line", [line for line, _, _ in BAD], ids=lambda line: next(iter(line)))
def test_a_few_bad_batches_are_not_reported(line: dict[str, float]) -> None:
    assert told({}, *([line] * (LINES_IN_A_ROW - 1) + [{}]) * 4) == []


def test_a_policy_that_has_solved_its_cases_may_be_sure() -> None:
    assert told({}, *[{"frac_reward_zero_std": 1.0, "entropy": 0.001, "reward": 0.98}] * 20) == []


@pytest.mark.parametrize(
    ("bounds", "reward", "meaning"),
    [
        ((-1.0, 1.0), -1.0, "at -1: the cases are too hard"),
        ((-1.0, 1.0), 0.0, "mostly near 0.00"),
        ((0.0, 100.0), 50.0, "mostly near 50.00"),
        ((0.0, 100.0), 95.0, None),
        (None, 0.0, "mostly near 0.00"),
        (None, 50.0, "mostly near 50.00"),
    ],
)
def test_solved_and_too_hard_are_parts_of_the_score_range(
    bounds: tuple[float, float] | None, reward: float, meaning: str | None
) -> None:
    advice = told(*[{"frac_reward_zero_std": 1.0, "reward": reward}] * 20, bounds=bounds)

    assert [meaning in line for line in advice if meaning] == [True] * (meaning is not None)
    assert bool(advice) == (meaning is not None)


def test_a_policy_that_was_sure_from_the_start_has_not_collapsed() -> None:
    assert told(*[{"entropy": 0.05}] * 20) == []


def test_missing_metrics_are_not_reported() -> None:
    state = DiagnosticsState()
    assert [state.update({"reward": 0.5}) for _ in range(20)] == [[]] * 20


class Same:
    """All answers are worth the same."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(12)]

    def score_episode(self) -> float:
        return 0.0


def test_a_run_that_cannot_learn_says_so_while_it_runs(
    train: Callable[..., Result], capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(Same(), max_steps=LINES_IN_A_ROW + 1)

    assert capsys.readouterr().err.count("100% of the groups all completions score the same, at 0") == 1
    assert {"frac_reward_zero_std", "completions/clipped_ratio", "unscored", "entropy"} <= set(result.history[0])


def test_a_run_that_cannot_learn_stops_itself_when_it_may_and_says_why(train: Callable[..., Result]) -> None:
    result = train(Same(), max_steps=50, stop_when_flat=4)

    written = json.loads((result.folder / "result.json").read_text())
    assert result.status == written["status"] == "stopped"
    assert result.steps == 4
    assert written["stopped_because"].startswith("in 4 steps no group's scores differed, the last ones all near 0.00")
    assert written["score_after"] == 0.0
    assert (result.folder / "checkpoints" / "checkpoint-4").exists()


class Rarely(Same):
    """The same, but for one group in the third step."""

    def score_episode(self) -> float:
        self.scored = getattr(self, "scored", 0) + 1
        return float(self.scored == 25)


def test_a_single_group_that_differs_begins_the_count_anew(train: Callable[..., Result]) -> None:
    result = train(Rarely(), max_steps=50, stop_when_flat=4, eval_cases=0)

    assert [line["frac_reward_zero_std"] for line in result.history] == [1, 1, 1, 0.5, 1, 1, 1, 1]
    assert result.status == "stopped"


def test_a_run_that_learns_does_not_stop_itself(train: Callable[..., Result]) -> None:
    result = train(Vowels(), max_steps=8, stop_when_flat=2)

    assert result.status == "finished"
    assert json.loads((result.folder / "result.json").read_text())["stopped_because"] is None
