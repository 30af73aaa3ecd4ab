"""Frameworks whose code runs in the run: five steps of training each, on two ranks in processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapters.conftest import cases_of, made, play
from tests.adapters.real.conftest import Train, in_environment

RANKS = "--num-processes=2"
"""Without --rl-env-isolation the adapters' code runs in processes, as a rank's others do."""
NEWEST, OLDER = in_environment("newest"), in_environment("older")
TRAINED: dict[str, dict[str, Any]] = {
    "reasoning-gym:polynomial_multiplication": {"size": 40},
    "textarena:GuessTheNumber-v0": {"size": 40},
    "gym:FrozenLake-v1": {"size": 40, "score_range": "0,1", "actions": ["left", "down", "right", "up"]},
}
"""What is trained in the environment with the newest packages, with its settings."""


@NEWEST
@pytest.mark.parametrize("rl_env", TRAINED)
def test_five_steps_of_training(rl_env: str, train: Train) -> None:
    for record in train(rl_env, RANKS, **TRAINED[rl_env]):  # each is scored against the entry that its prompt asks
        asked = record["row"].get("entry", {}).get("question", "")
        assert asked in (record["prompt"] or [{"content": ""}])[-1]["content"]


@OLDER
def test_a_game_of_gem_is_won() -> None:
    env = made("gem:game:GuessTheNumber-v0-easy", size=4, score_range="-1,1", arguments={"max_turns": 11})
    results = [play(env, case, [rf"\boxed{{{n}}}" for n in range(1, 11)])[1] for case in cases_of(env)]
    assert [result.score for result in results] == [1.0] * 4
