"""Environments of verifiers 0.3, on a stand-in with its functions; `real/` has the package itself, 0.4 as well."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable

import pytest

from aitrain.execution.async_calls import run_if_async
from tests.adapters.conftest import cases_of, made
from tests.adapters.verifiers_standin import FILES
from tests.rollout.scripted import Limits, Scripted, play_with_notes

RANGE = {"score_range": "0,1.5"}


@pytest.fixture(autouse=True)
def verifiers(install: Callable[..., None]) -> None:
    install("verifiers", "0.3.1", FILES)


def saying(*answers: str) -> Scripted:
    """Says these answers one after another, in each episode."""
    return Scripted(lambda so_far: answers[min(so_far.count("again"), len(answers) - 1)] + "$")


def test_rows_hold_all_that_a_rollout_needs_and_held_out_ones_are_the_environments_own() -> None:
    handler, environment = signal.getsignal(signal.SIGTERM), made("verifiers:my-env", **RANGE)
    first, *_ = cases_of(environment)
    assert first.prompt == [{"role": "system", "content": "Add."}, {"role": "user", "content": "0+0"}]
    assert first.row["vf_input"] == {"answer": "0"}
    assert len(environment.build_eval_dataset()) == 2
    assert made("verifiers:my-env", arguments={"held_out": 0}, **RANGE).build_eval_dataset is None
    assert signal.getsignal(signal.SIGTERM) is handler  # which the framework sets
    run_if_async(environment.close())
    assert environment.env.torn_down == 1


def test_the_rubric_scores_and_each_function_is_a_metric() -> None:
    environment = made("verifiers:my-env", **RANGE)
    episodes, _ = play_with_notes(
        environment, saying("2"), of=cases_of(environment)[:3], rl_env_isolation="process", rl_score_range="any"
    )
    assert [episode.result.score for episode in episodes] == [0.45, 1.45, 0.45]
    assert episodes[1].result.metrics == {"exact": 1.0, "short": 0.9}


@pytest.mark.parametrize(
    ("weight", "said", "words"),
    [(0.1, "2", r"ValueError: no dictionary(.|\n)*my_env.py, line"), (0.0, "raise", "the tool's server is gone")],
)
def test_a_weighted_function_or_a_rollout_that_raises_is_missing_data(weight: float, said: str, words: str) -> None:
    environment = made("verifiers:my-env", arguments={"broken_weight": weight}, **RANGE)
    (episode,), _ = play_with_notes(environment, saying(said), of=cases_of(environment)[:1])
    assert (episode.result.score, episode.stop) == (None, "env_error")
    assert re.search(words, episode.failure_message), episode.failure_message


def test_a_limit_ends_the_rollout_which_is_scored() -> None:
    environment = made("verifiers:my-env", arguments={"max_turns": 5}, **RANGE)
    (episode,), _ = play_with_notes(
        environment, saying("9", "0"), Limits(2, 99), of=cases_of(environment)[:1], rl_score_range="0,2"
    )
    assert (episode.stop, episode.result.score) == ("max_turns", 1.45)
