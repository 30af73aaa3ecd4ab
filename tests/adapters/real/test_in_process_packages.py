"""The frameworks themselves: five steps of training each, in processes, in threads and on two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aitrain.environment.adapters.installed_source import registrations
from tests.adapters.conftest import cases_of, made, play, refusal
from tests.adapters.real.conftest import ENVIRONMENT
from tests.conftest import Run, write

MODES = {"processes": (), "threads": ("--rl-env-isolation", "thread"), "ranks": ("--num-processes", "2")}
SHORT = (
    "--model", "tiny", "--max-steps", "5", "--rl-prompts-per-step", "2", "--rl-num-generations", "4",
    "--rl-max-new-tokens", "12", "--rl-max-turns", "3", "--eval-cases", "2",
)  # fmt: skip
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
    "reasoning-gym:polynomial_multiplication": {"size": 40, "max_terms": 2},
    "reasoning-gym:composite": {"size": 40, "datasets": [{"name": "chain_sum"}, {"name": "leg_counting", "weight": 2}]},
    "textarena:GuessTheNumber-v0": {"size": 40},
    "textarena:TicTacToe-v0": {"size": 40},
    "gym:FrozenLake-v1": {"size": 40, "score_range": "0,1", "actions": ["left", "down", "right", "up"]},
    "gem:game:GuessTheNumber-v0-easy": {"size": 40, "score_range": "-1,1"},
    "trl:counter.py:Counter": {"data": "targets.jsonl", "score_range": "any"},
    "reward:counter.py:has_digit,longest": {"data": "targets.jsonl", "weights": [1, 0.5], "score_range": "0,1.5"},
}


def require(name: str) -> None:
    """Skip a test outside of the environment of its package."""
    if ("older" if name == "gem" else "newest") != ENVIRONMENT:
        pytest.skip(f"{name} is tested in another environment of .ci/adapters")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rl_env", TRAINED)
def test_five_steps_of_training(rl_env: str, mode: str, here: Path, aitrain_grpo: Run) -> None:
    require(rl_env.partition(":")[0])
    rows = [{"prompt": [{"role": "user", "content": f"Go {n}."}], "target": n} for n in range(1, 17)]
    write(here, {"counter.py": COUNTER, "targets.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    config = json.dumps(TRAINED[rl_env])
    done = aitrain_grpo("--rl-env", rl_env, "--rl-env-config", config, *SHORT, "--project-name", "it", *MODES[mode])
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (here / "runs/it/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward" in line]
    assert len(steps) == 5
    for line in lines:
        assert not any(value for name, value in line.items() if name.startswith("failed/")), line
    episodes = [json.loads(line) for file in (here / "runs/it/rollouts").rglob("*.jsonl") for line in file.open()]
    assert len([episode for episode in episodes if episode["score"] is not None]) >= 5 * 8
    for episode in episodes:  # each is scored against the entry that its prompt asks
        asked = episode["row"].get("entry", {}).get("question", "")
        assert asked in (episode["prompt"] or [{"content": ""}])[-1]["content"]


# -- reasoning-gym

WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


def test_every_task_of_reasoning_gym_scores_its_own_answers() -> None:
    require("reasoning-gym")
    from aitrain.environment.adapters.reasoning_gym import _tasks

    tasks = set(_tasks())
    factory = pytest.importorskip("reasoning_gym.factory")
    assert tasks == set(factory.DATASETS)
    for task in tasks - {"composite"}:
        env = made(f"reasoning-gym:{task}", size=2)
        cases = cases_of(env)
        references = [env.reference(case.case_idx) for case in cases]
        assert (None in references) == (task in WITHOUT_ANSWER), task
        scores = [play(env, case, [right])[1].score for case, right in zip(cases, references, strict=True) if right]
        assert scores == [1.0] * len(scores), task


def test_settings_of_reasoning_gyms_tasks_are_checked() -> None:
    require("reasoning-gym")
    assert "Did you mean chain_sum?" in refusal("reasoning-gym:chain_sm")
    assert "Did you mean max_terms?" in refusal("reasoning-gym:chain_sum", max_term=3)


# -- textarena


def test_textarenas_ids_are_read_from_its_source() -> None:
    require("textarena")
    assert len(registrations("textarena")) > 200
    assert "Did you mean GuessTheNumber-v0?" in refusal("textarena:GuessTheNumbr-v0")
    assert "Did you mean max_turns?" in refusal("textarena:GuessTheNumber-v0", max_turn=3)


def test_a_game_of_textarena_is_won() -> None:
    require("textarena")
    env = made("textarena:GuessTheNumber-v0", size=1, max_turns=20)
    said, result = play(env, cases_of(env)[0], [f"[{number}]" for number in range(1, 21)])
    assert "between 1 and 20 within 20 turns" in said[0]
    assert said[0] not in said[1:]  # an observation is only what is new
    assert result.score == 1.0


@pytest.mark.parametrize("seat", [0, 1])
def test_a_game_of_textarena_is_played_against_another_player(seat: int) -> None:
    require("textarena")
    env = made("textarena:TicTacToe-v0", size=8, seat=seat)
    for case in cases_of(env):
        said, result = play(env, case, [f"[{cell}]" for cell in range(9)])
        assert (f"[Player {1 - seat}]" in said[0]) == bool(seat)
        assert result.score in (-1.0, 0.0, 1.0)


def test_an_opponent_of_textarena_that_errs_gives_no_win(here: Path) -> None:
    require("textarena")
    write(here, {"players.py": "def wild(seen, rng):\n    return 'I resign.'\n"})
    env = made("textarena:TicTacToe-v0", size=1, opponent="players.py:wild")
    result = play(env, cases_of(env)[0], ["[0]", "[1]"])[1]
    assert (result.score, result.metrics["opponent_erred"]) == (None, 1.0)


# -- gymnasium and GEM


def test_a_map_of_gymnasium_is_crossed() -> None:
    require("gym")
    settings = {"score_range": "0,1", "actions": ["left", "down", "right", "up"], "is_slippery": False, "size": 1}
    env = made("gym:FrozenLake-v1", **settings)
    said, result = play(env, cases_of(env)[0], ["down", "down", "right", "right", "down", "right"])
    assert said[0].startswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert result.score == 1.0


def test_ids_of_gymnasium_are_read_from_its_source() -> None:
    require("gym")
    assert "Did you mean FrozenLake-v1?" in refusal("gym:FrozenLake-v2")
    assert "Did you mean is_slippery?" in refusal("gym:FrozenLake-v1", is_sliper=True)


def test_a_game_and_a_question_of_gem_are_won() -> None:
    require("gem")
    env = made("gem:game:GuessTheNumber-v0-easy", size=4, score_range="-1,1", max_turns=11)
    results = [play(env, case, [rf"\boxed{{{n}}}" for n in range(1, 11)])[1] for case in cases_of(env)]
    assert [result.score for result in results] == [1.0] * 4
    env = made("gem:rg:chain_sum", size=1, score_range="-1,1")
    assert play(env, cases_of(env)[0], [r"\boxed{0}"])[1].score is not None
    assert "Did you mean game:GuessTheNumber-v0-easy?" in refusal("gem:game:GuessTheNumber-v0-eazy")


# -- math-verify


@pytest.mark.parametrize("mode", ["processes", "threads"])
def test_math_verify_works_in_processes_and_trls_function_in_threads_too(
    mode: str, here: Path, aitrain_grpo: Run
) -> None:
    require("math-verify")
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "solution": f"${n + 1}$"} for n in range(16)]
    write(here, {"sums.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    config = json.dumps({"data": "sums.jsonl", "score_range": "0,1"})
    options = ("--rl-env", "reward:trl.rewards:accuracy_reward", "--rl-env-config", config, *SHORT)
    done = aitrain_grpo(*options, "--project-name", "it", *MODES[mode])
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in (here / "runs/it/metrics.jsonl").read_text().splitlines()]
    assert not any(line.get("failed/raised") for line in lines)
