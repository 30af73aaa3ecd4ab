"""Recipes: complete, honest about who measured them, and each trains with the tiny model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.environment.loader import load_env
from aitrain.environment.locator import find_env
from aitrain.options.reading import resolve
from aitrain.options.recipes import Recipe, read_recipe, recipes

ALL = recipes()
OWN = [one for one in ALL if (one.folder / "environment.py").is_file()]
WITH_REFERENCE = [one for one in OWN if "def reference(" in (one.folder / "environment.py").read_text(encoding="utf-8")]
"""Read from the text: every process that runs tests would otherwise make all their cases to collect this file."""


def by_name(recipe: Recipe) -> str:
    return recipe.name


def loaded(recipe: Recipe) -> Any:
    config = resolve(TrainConfig, None, {}, recipe.options(tiny=True))
    return load_env(find_env(config), config.rl_env_config or {})


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
def test_a_recipe_says_what_there_is_to_know_and_its_options_are_valid(recipe: Recipe) -> None:
    for name in ("title", "about", "hardware", "minutes", "before", "after", "source"):
        assert getattr(recipe, name), name
    resolve(TrainConfig, None, {}, recipe.options())
    with pytest.raises(ConfigError, match="Did you mean"):
        read_recipe(f"{recipe.name}x")
    with pytest.raises(ConfigError, match="There is no recipe"):
        read_recipe(f"../recipes/{recipe.name}")


@pytest.mark.parametrize("recipe", ALL, ids=by_name)
@pytest.mark.slow
def test_the_twin_of_a_recipe_trains_with_the_tiny_model(recipe: Recipe, here: Path, preloaded_aitrain: Path) -> None:
    if recipe.needs and find_spec(recipe.needs.replace("-", "_")) is None:
        pytest.skip(f"{recipe.needs} is not installed")
    command = [str(preloaded_aitrain / "aitrain"), "recipe", "run", recipe.name, "--tiny", "--max-steps", "1", "--json"]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])["result"]
    assert (result["status"], result["steps"]) == ("finished", 1)
    failures = result.get("failures") or {}
    assert not any(failures.values()), failures


@pytest.mark.parametrize("recipe", WITH_REFERENCE, ids=by_name)
def test_the_reference_of_an_environment_earns_the_highest_score(recipe: Recipe) -> None:
    environment = loaded(recipe)
    takes_tokenizer = "tokenizer" in signature(environment.build_dataset).parameters
    rows = environment.build_dataset(**({"tokenizer": None} if takes_tokenizer else {}))
    for number in range(0, len(rows), max(1, len(rows) // 20)):
        assert score_of(environment, rows[number], number, environment.reference(number)) == 1.0
        assert score_of(environment, rows[number], number, "") < 0.2


def score_of_question(question: Any, replies: list[str]) -> float:
    """A reply that is a call goes to the tool."""
    for reply in replies:
        if found := re.fullmatch("<tool_call>(.*)</tool_call>", reply):
            (tool,) = question.get_tools()
            tool(**json.loads(found[1])["arguments"])
        else:
            question.step(reply)
    return float(question.score())


def score_of(environment: Any, row: dict[str, Any], number: int, replies: str | list[str]) -> float:
    if hasattr(environment, "start"):
        every = [replies] if isinstance(replies, str) else replies
        return score_of_question(environment.start(row["expression"]), every)
    if not hasattr(environment, "episode"):
        wanted = {name: row[name] for name in ("answer", "numbers", "target") if name in row}
        score = environment.score_episode(text=replies, **wanted)
        return float(score["score"] if isinstance(score, dict) else score)
    known = {**row, "case_idx": number, "seed": 0}
    episode = environment.episode(**{name: known[name] for name in signature(environment.episode).parameters})
    next(episode)
    for reply in [*([replies] if isinstance(replies, str) else replies), *[""] * 50]:
        try:
            episode.send(reply)
        except StopIteration as end:
            return float(end.value)
    raise AssertionError("the episode does not end")


def test_games_follow_their_rules() -> None:
    game = sys.modules[type(loaded(read_recipe("2048"))).__module__]
    assert game.slid([[2, 2, 4], [0, 4, 4], [2, 0, 2]], "left") == [[4, 4, 0], [8, 0, 0], [4, 0, 0]]
    countdown = sys.modules[type(loaded(read_recipe("countdown"))).__module__]
    assert countdown.evaluate("(1 + 2) * 3") == ([1, 2, 3], 9)
    for hostile in ("__import__('os')", "9**9**9", "1 if 1 else 2", "(" * 99, "1/0", "1" * 300):
        assert countdown.evaluate(hostile)[1] is None, hostile
