"""The player plays episodes with scripted policies, with the calls that training makes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

import pytest

from aitrain import TrainConfig
from aitrain.environment.contract import Case
from aitrain.workbench.player import EMPTY, Play, Player, Policy, Script, reference_of

PROMPT = [{"role": "user", "content": "begin"}]
CASE = Case(7, PROMPT, {"prompt": PROMPT})


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


@pytest.mark.parametrize(
    ("policy", "turns", "stop", "score", "said"),
    [
        (reference_of(Echo(), CASE), 9, "done", 1.0, ["a", "7/3: a", "b", "7/3: b", "right"]),
        (Script(("a",)), 9, "out_of_replies", 0.0, ["a", "7/3: a"]),
        (EMPTY, 2, "max_turns", 0.0, ["", "7/3: ", ""]),
        (Script(("a", "b", "raise")), 9, "env_error", None, ["a", "7/3: a", "b", "7/3: b", "raise"]),
    ],
)
def test_an_episode_is_played_turn_by_turn_to_its_end_and_scored(
    policy: Policy, turns: int, stop: str, score: float | None, said: list[str]
) -> None:
    with closing(Player(Echo(), TrainConfig(rl_max_turns=turns))) as player:
        (episode,) = player.play([Play(CASE, policy, 3)])
    assert (episode.stop, episode.score) == (stop, score)
    assert [message["content"] for message in episode.messages] == said
