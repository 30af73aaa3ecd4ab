"""Frameworks whose code runs in the run: five steps of training each, on two ranks in processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.conftest import cases_of, made, play, refusal
from tests.adapters.real.conftest import Train, in_environment
from tests.conftest import write

RANKS = "--num-processes=2"
"""Without --rl-env-isolation the adapters' code runs in processes, as a rank's others do."""
NEWEST, OLDER = in_environment("newest"), in_environment("older")
COUNTER = '''
class Counter:
    def reset(self, target, **row):
        self.value, self.target = 0, target
        return f"Count to {target}."

    def increment(self, by: int) -> int:
        """Add to the counter."""
        self.value += by
        return self.value

    def get_reward(self):
        return 1.0 - abs(self.value - self.target) / self.target

def longest(completions, **kwargs):
    lengths = [len(str(one)) for one in completions]
    return [float(length == max(lengths)) for length in lengths]

def has_digit(completions, **kwargs):
    return [float(any(letter.isdigit() for letter in str(one))) for one in completions]
'''
TRAINED: dict[str, dict[str, Any]] = {
    "reasoning-gym:polynomial_multiplication": {"size": 40},
    "textarena:GuessTheNumber-v0": {"size": 40},
    "gym:FrozenLake-v1": {"size": 40, "score_range": "0,1", "actions": ["left", "down", "right", "up"]},
    "trl:counter.py:Counter": {"data": "targets.jsonl", "score_range": "any"},
    "reward:counter.py:has_digit,longest": {"data": "targets.jsonl", "weights": [1, 0.5], "score_range": "0,1.5"},
}
"""What is trained in the environment with the newest packages, with its settings."""


@NEWEST
@pytest.mark.parametrize("rl_env", TRAINED)
def test_five_steps_of_training(rl_env: str, here: Path, train: Train) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"Go {n}."}], "target": n} for n in range(1, 17)]
    write(here, {"counter.py": COUNTER, "targets.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    for record in train(rl_env, RANKS, **TRAINED[rl_env]):  # each is scored against the entry that its prompt asks
        asked = record["row"].get("entry", {}).get("question", "")
        assert asked in (record["prompt"] or [{"content": ""}])[-1]["content"]
        assert not rl_env.startswith("reward") or {"has_digit", "longest"} <= record["metrics"].keys()


@OLDER
def test_a_game_and_a_question_of_gem_are_won() -> None:
    env = made("gem:game:GuessTheNumber-v0-easy", size=4, score_range="-1,1", max_turns=11)
    results = [play(env, case, [rf"\boxed{{{n}}}" for n in range(1, 11)])[1] for case in cases_of(env)]
    assert [result.score for result in results] == [1.0] * 4
    env = made("gem:rg:chain_sum", size=1, score_range="-1,1")
    assert play(env, cases_of(env)[0], [r"\boxed{0}"])[1].score is not None
    assert "Did you mean game:GuessTheNumber-v0-easy?" in refusal("gem:game:GuessTheNumber-v0-eazy")
