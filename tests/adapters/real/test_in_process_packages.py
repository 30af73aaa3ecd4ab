"""Frameworks whose code runs in the run: five steps of training each, on two ranks in processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError
from aitrain.environment.adapters.installed_source import registrations
from aitrain.options.recipes import read_recipe
from tests import test_docs, test_recipes
from tests.adapters.conftest import cases_of, made, play, refusal
from tests.adapters.real.conftest import ROOT, Train, in_environment
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
WORDS = ["left", "down", "right", "up"]
TRAINED: dict[str, dict[str, Any]] = {
    "reasoning-gym:polynomial_multiplication": {"size": 40},
    "textarena:GuessTheNumber-v0": {"size": 40},
    "gym:FrozenLake-v1": {"size": 40, "score_range": "0,1", "actions": WORDS},
    "trl:counter.py:Counter": {"data": "targets.jsonl", "score_range": "any"},
    "reward:counter.py:has_digit,longest": {"data": "targets.jsonl", "weights": [1, 0.5], "score_range": "0,1.5"},
}
"""What is trained in the environment with the newest packages, with its settings."""


@NEWEST
@pytest.mark.parametrize("rl_env", TRAINED)
def test_five_steps_of_training(rl_env: str, here: Path, train: Train) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"Go {n}."}], "target": n} for n in range(1, 17)]
    write(here, {"counter.py": COUNTER, "targets.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    trained = train(rl_env, RANKS, **TRAINED[rl_env])
    for record in trained.records:  # each is scored against the entry that its prompt asks
        asked = record["row"].get("entry", {}).get("question", "")
        assert asked in (record["prompt"] or [{"content": ""}])[-1]["content"]
    if rl_env.startswith("reward"):
        assert all("env/longest" in line for line in trained.metrics if "reward" in line)


@OLDER
def test_five_steps_of_training_with_gem(train: Train) -> None:
    train("gem:game:GuessTheNumber-v0-easy", RANKS, size=40, score_range="-1,1")


# -- reasoning-gym

WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


@NEWEST
def test_every_task_of_reasoning_gym_scores_its_own_answers() -> None:
    from aitrain.environment.adapters.reasoning_gym import _tasks

    tasks = set(_tasks())
    factory = pytest.importorskip("reasoning_gym.factory")
    assert tasks == set(factory.DATASETS)
    for task in tasks - {"composite"}:
        env = made(f"reasoning-gym:{task}", size=2)
        cases = cases_of(env)
        references = [env.reference(case.row["entry"]) for case in cases]
        assert (None in references) == (task in WITHOUT_ANSWER), task
        scores = [play(env, case, [right])[1].score for case, right in zip(cases, references, strict=True) if right]
        assert scores == [1.0] * len(scores), task


@NEWEST
def test_a_task_without_answers_has_no_solved_entries_to_show() -> None:
    with pytest.raises(ConfigError, match="have no answer to show"):
        cases_of(made("reasoning-gym:propositional_logic", size=1, few_shot=1))


@NEWEST
def test_settings_of_reasoning_gyms_tasks_are_checked() -> None:
    assert "Did you mean chain_sum?" in refusal("reasoning-gym:chain_sm")
    assert "Did you mean max_terms?" in refusal("reasoning-gym:chain_sum", max_term=3)


# -- textarena


@NEWEST
def test_textarenas_ids_are_read_from_its_source() -> None:
    assert len(registrations("textarena")) > 200
    assert "Did you mean GuessTheNumber-v0?" in refusal("textarena:GuessTheNumbr-v0")
    assert "Did you mean max_turns?" in refusal("textarena:GuessTheNumber-v0", max_turn=3)


@NEWEST
def test_a_game_of_textarena_is_won() -> None:
    env = made("textarena:GuessTheNumber-v0", size=1, max_turns=20)
    said, result = play(env, cases_of(env)[0], [f"[{number}]" for number in range(1, 21)])
    assert "between 1 and 20 within 20 turns" in said[0]
    assert said[0] not in said[1:]  # an observation is only what is new
    assert result.score == 1.0


@NEWEST
@pytest.mark.parametrize("seat", [0, 1])
def test_a_game_of_textarena_is_played_against_another_player(seat: int) -> None:
    env = made("textarena:TicTacToe-v0", size=8, seat=seat)
    for case in cases_of(env):
        said, result = play(env, case, [f"[{cell}]" for cell in range(9)])
        assert (f"[Player {1 - seat}]" in said[0]) == bool(seat)
        assert result.score in (-1.0, 0.0, 1.0)


@NEWEST
def test_an_opponent_of_textarena_that_errs_gives_no_win(here: Path) -> None:
    write(here, {"players.py": "def wild(seen, rng):\n    return 'I resign.'\n"})
    env = made("textarena:TicTacToe-v0", size=1, opponent="players.py:wild")
    result = play(env, cases_of(env)[0], ["[0]", "[1]"])[1]
    assert (result.score, result.metrics["opponent_erred"]) == (None, 1.0)


# -- gymnasium and GEM


@NEWEST
def test_a_map_of_gymnasium_is_crossed() -> None:
    settings = {"score_range": "0,1", "actions": ["left", "down", "right", "up"], "is_slippery": False, "size": 1}
    env = made("gym:FrozenLake-v1", **settings)
    said, result = play(env, cases_of(env)[0], ["down", "down", "right", "right", "down", "right"])
    assert said[0].startswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert result.score == 1.0


@NEWEST
def test_ids_of_gymnasium_are_read_from_its_source() -> None:
    assert "Did you mean FrozenLake-v1?" in refusal("gym:FrozenLake-v2")
    assert "Did you mean is_slippery?" in refusal("gym:FrozenLake-v1", is_sliper=True)


@OLDER
def test_a_game_and_a_question_of_gem_are_won() -> None:
    env = made("gem:game:GuessTheNumber-v0-easy", size=4, score_range="-1,1", max_turns=11)
    results = [play(env, case, [rf"\boxed{{{n}}}" for n in range(1, 11)])[1] for case in cases_of(env)]
    assert [result.score for result in results] == [1.0] * 4
    env = made("gem:rg:chain_sum", size=1, score_range="-1,1")
    assert play(env, cases_of(env)[0], [r"\boxed{0}"])[1].score is not None
    assert "Did you mean game:GuessTheNumber-v0-easy?" in refusal("gem:game:GuessTheNumber-v0-eazy")


# -- math-verify


VERIFIED = """
from math_verify import parse, verify

def equal(completions, solution, **kwargs):
    return [float(verify(parse(right), parse(one[0]["content"] or "0"))) for one, right in zip(completions, solution)]
"""


@NEWEST
def test_math_verify_and_trls_function_with_it_work_in_processes(here: Path, train: Train) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "solution": f"${n + 1}$"} for n in range(16)]
    write(here, {"sums.jsonl": "".join(json.dumps(row) + "\n" for row in rows), "my_rewards.py": VERIFIED})
    train("reward:my_rewards.py:equal,trl.rewards:accuracy_reward", data="sums.jsonl", score_range="0,2")


# -- pages


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("reasoning-gym", marks=NEWEST),
        pytest.param("textarena", marks=NEWEST),
        pytest.param("gym", marks=NEWEST),
        pytest.param("gym", marks=OLDER, id="gym-with-gem"),
    ],
)
def test_the_examples_of_a_page_run(name: str, here: Path, commands: Path) -> None:
    test_docs.test_the_examples_of_a_page_run_as_they_are(ROOT / "docs" / f"adapters-{name}.md", here, commands)


@NEWEST
@pytest.mark.parametrize("name", ["reasoning-mix", "smollm2-needle"])
def test_the_twins_of_reasoning_gyms_recipes_train(name: str, here: Path, commands: Path) -> None:
    test_recipes.test_the_twin_of_a_recipe_trains_with_the_tiny_model(read_recipe(name), here, commands)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the command aitrain of this environment, first in PATH."""
    write(tmp_path, {"bin/aitrain": f'#!/bin/sh\nexec "{sys.executable}" -m aitrain "$@"\n'})
    (tmp_path / "bin" / "aitrain").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "bin"
