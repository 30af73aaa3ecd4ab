"""Several environments in one run, without a model: how they are named, which shares they have, and how they play."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.environment.dataset import Datasets, build_cases
from aitrain.environment.loader import locate_environments
from aitrain.environment.runner import MixedRunner
from aitrain.errors import AitrainError
from aitrain.jobs.env_loading import load_runner
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.episode import Episode, Rollout
from tests.rollout.scripted import Letters, Scripted

FILE = "tests/environments/several.py"
THREE = [f"Early={FILE}:Early", f"talk={FILE}:Talk", f"Ranked={FILE}:Ranked"]
TWICE = [f"easy={FILE}:Early", f"hard={FILE}:Early"]


def test_shares_are_those_of_the_weights() -> None:
    assert TrainConfig(rl_env=TWICE, rl_env_weights=[3, 1]).env_shares == {"easy": 0.75, "hard": 0.25}


def loaded(places: list[str], **options: Any) -> MixedRunner:
    runner = load_runner(TrainConfig(rl_env=places, **options), lambda _: None)
    assert isinstance(runner, MixedRunner)
    return runner


def built_cases(runner: MixedRunner) -> dict[str, Datasets]:
    built, first = dict[str, Datasets](), 0
    for name, part in runner.parts.items():
        built[name] = build_cases(part.environment, None, name, first)
        first += sum(map(len, built[name]))
    return built


def played(runner: MixedRunner, answer: str = "abz$", each: int = 3) -> dict[str, list[Episode]]:
    """Episodes of the first cases of each environment, played side by side, by the environment's name."""
    built = built_cases(runner)
    cases = [train[number] for number in range(each) for train, _ in built.values()]
    rollout = Rollout(runner, Scripted(lambda _: answer), ChatFormat(Letters()), None)
    episodes = asyncio.run(rollout.play(cases, range(len(cases)), range(len(cases))))
    assert [episode.case for episode in episodes] == cases
    return {name: [one for one in episodes if one.case.env == name] for name in runner.parts}


def test_each_episode_is_played_by_the_environment_of_its_case() -> None:
    with closing(loaded(THREE)) as runner:
        found = played(runner)
        assert [part.processes is not None for part in runner.parts.values()] == [False, True, False]
    assert [one.result.score for one in found["Early"]] == [2 / 3] * 3
    assert [len(one.trajectory.turns) for one in found["talk"]] == [2] * 3
    assert [one.result.score for one in found["talk"]] == pytest.approx([-1.0, 1 / 3, -1.0])
    assert [one.result.score for one in found["Ranked"]] == [0.0] * 3


def test_what_an_environment_requires_holds_for_its_own_episodes() -> None:
    with closing(loaded(THREE)) as runner:
        assert (runner.config.rl_max_turns, runner.parts["talk"].config.rl_max_turns) == (16, 2)
        assert runner.config.rl_score_range == "-1.0,1.0"
        assert runner.parts["Early"].config.rl_score_range == "0,1"
        assert [part.episodes_at_once for part in runner.parts.values()] == [None, 5, None]
        found = played(runner, "abcdefghijklmn")
    assert [one.trajectory.sampled_tokens for one in found["talk"]] == [8] * 3


def test_two_environments_of_one_class_have_their_own_keywords() -> None:
    with closing(loaded(TWICE, rl_env_config={"hard": {"word": "spell"}})) as runner:
        found = played(runner)
    assert [found[name][0].case.prompt for name in ("easy", "hard")] == ["say 0:", "spell 0:"]


def test_cases_of_all_environments_have_numbers_of_their_own() -> None:
    with closing(loaded(THREE)) as runner:
        built = built_cases(runner)
    everything = [case for train, held_out in built.values() for case in (*train, *held_out)]
    assert [case.number for case in everything] == list(range(20 + 12 + 12 + 3))
    mixed = [case.env for train, _ in built.values() for case in train]
    assert mixed[18:34:5] == ["Early", "talk", "talk", "Ranked"]


def test_what_is_wrong_with_one_environment_names_it() -> None:
    with pytest.raises(AitrainError, match="environment second"):
        locate_environments(TrainConfig(rl_env=[THREE[0], "second=no_such.py:Env"]))
