"""Recipes: complete, honest about who measured them, and each trains with the tiny model."""

from __future__ import annotations

import json
from importlib.util import find_spec
from runpy import run_path

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.environment.dataset import build_cases
from aitrain.environment.loader import load_env
from aitrain.options.reading import RECIPES, read_recipe, recipes, resolve
from tests.adapters.conftest import made
from tests.conftest import Run
from tests.rehearsal import rehearse

ALL = recipes()
OWN = [name for name in ALL if (RECIPES / name / "environment.py").is_file()]
WITH_REFERENCE = [
    name for name in OWN if "def reference(" in (RECIPES / name / "environment.py").read_text(encoding="utf-8")
]
"""Read from the text: every process that runs tests would otherwise make all their cases to collect this file."""


@pytest.mark.parametrize("name", ALL)
def test_a_recipe_says_what_there_is_to_know_and_its_options_are_valid(name: str) -> None:
    known = read_recipe(name)
    for part in ("title", "about", "hardware", "before", "after", "source"):
        assert str(known[part]), part
    assert isinstance(known["measured"], bool)
    resolve(TrainConfig, None, {}, known["options"])
    resolve(TrainConfig, None, {}, known["options"] | known["tiny"])
    with pytest.raises(ConfigError, match="Did you mean"):
        read_recipe(f"{name}x")
    with pytest.raises(ConfigError, match="There is no recipe"):
        read_recipe(f"../recipes/{name}")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow
def test_the_twin_of_a_recipe_trains_with_the_tiny_model(name: str, aitrain: Run) -> None:
    needs = ALL[name].get("needs")
    if needs and find_spec(needs.replace("-", "_")) is None:
        pytest.skip(f"{needs} is not installed")
    done = aitrain("recipe", "run", name, "--tiny", "--max-steps", "1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])["result"]
    assert (result["status"], result["steps"]) == ("finished", 1)
    failures = result.get("failures") or {}
    assert not any(failures.values()), failures


@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_the_reference_of_an_environment_earns_the_highest_score(name: str) -> None:
    config = resolve(TrainConfig, None, {}, ALL[name]["options"] | ALL[name]["tiny"])
    environment = load_env(config)
    cases, _ = build_cases(environment, None)
    for number in range(0, len(cases), max(1, len(cases) // 20)):
        reference = environment.reference(number)
        replies = [reference] if isinstance(reference, str) else reference
        assert rehearse(environment, [*replies, *[""] * 50], cases[number]).scored.score == 1.0
        assert rehearse(environment, [""] * 50, cases[number]).scored.score < 0.2


def test_games_follow_their_rules() -> None:
    episode = made("envs.guess_number").episode(6, seed=0)
    said = [next(episode), *map(episode.send, ("4", "7", "8"))]
    assert said == [None, "higher", "lower", "Say a number from 1 to 7."]
    with pytest.raises(StopIteration) as stop:
        episode.send(" 6\n")
    assert stop.value.value == 0.25
    slid = run_path(str(RECIPES / "2048" / "environment.py"))["slid"]
    assert slid([[2, 2, 4], [0, 4, 4], [2, 0, 2]], "left") == [[4, 4, 0], [8, 0, 0], [4, 0, 0]]
    evaluate = run_path(str(RECIPES / "countdown" / "environment.py"))["evaluate"]
    assert evaluate("(1 + 2) * 3") == ([1, 2, 3], 9)
    for hostile in ("__import__('os')", "9**9**9", "1 if 1 else 2", "(" * 99, "1/0", "1" * 300):
        assert evaluate(hostile)[1] is None, hostile
