"""The player plays episodes with scripted policies, with the calls that training makes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.environment.contract import Case
from aitrain.workbench.player import EMPTY, Play, PlayedEpisode, Player, Policy, Script, reference_of

PROMPT = [{"role": "user", "content": "begin"}]


class Echo:
    """Repeats what was said, for three turns."""

    def episode(self, case_idx: int, seed: int) -> Generator[str | None, str, float]:
        said = [(yield None)]
        for _ in range(2):
            said.append((yield f"{case_idx}/{seed}: {said[-1]}"))
        if said[-1] == "raise":
            raise ValueError("no")
        return float(said[-1] == "right")

    def reference(self, case_idx: int) -> list[str]:
        return ["a", "b", "right"]


def play(environment: object, policy: Policy, seed: int = 0, **options: Any) -> PlayedEpisode:
    with closing(Player(environment, TrainConfig(**options))) as player:
        return player.play([Play(Case(7, PROMPT, {"prompt": PROMPT}), policy, seed)])[0]


def test_the_reference_is_played_turn_by_turn_and_scored() -> None:
    reference = reference_of(Echo(), Case(7, "x", {}))
    assert reference is not None
    episode = play(Echo(), reference, seed=3)
    assert (episode.score, episode.stop) == (1.0, "done")
    assert [message["content"] for message in episode.messages] == ["a", "7/3: a", "b", "7/3: b", "right"]


@pytest.mark.parametrize(
    ("policy", "turns", "stop", "score", "answers"),
    [
        (Script(("a",)), 9, "out_of_replies", 0.0, 1),
        (EMPTY, 2, "max_turns", 0.0, 2),
        (EMPTY, 3, "done", 0.0, 3),
        (Script(("a", "b", "raise")), 9, "env_error", None, 3),
    ],
)
def test_an_episode_ends_with_the_script_the_limit_the_environment_or_a_failure(
    policy: Policy, turns: int, stop: str, score: float | None, answers: int
) -> None:
    episode = play(Echo(), policy, rl_max_turns=turns)
    assert (episode.stop, episode.score, len(episode.turns)) == (stop, score, answers)
    assert (episode.failure is not None) == (score is None)
