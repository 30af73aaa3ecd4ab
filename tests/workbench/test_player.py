"""The player plays episodes with scripted policies, with the calls that training makes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import pytest

from aitrain import EnvironmentFailed, TrainConfig
from aitrain.environment.contract import Case
from aitrain.workbench.player import EMPTY, Conversation, Play, PlayedEpisode, Player, Policy, Script, reference_of


class Echo:
    """Repeats what was said, for three turns."""

    def episode(self, case_idx: int, seed: int) -> Generator[str | None, str, float]:
        said = [(yield None)]
        for _ in range(2):
            said.append((yield f"{case_idx}/{seed}: {said[-1]}"))
        return float(said[-1] == "right")

    def build_dataset(self) -> list[dict[str, Any]]:
        return []

    def reference(self, case_idx: int) -> list[str]:
        return ["a", "b", "right"]


def play(environment: object, policy: Policy, seed: int = 0, **options: Any) -> PlayedEpisode:
    prompt = [{"role": "user", "content": "begin"}]
    with closing(Player(environment, TrainConfig(**options))) as player:
        return player.play([Play(Case(7, prompt, {"prompt": prompt}), policy, seed)])[0]


def test_the_reference_is_played_turn_by_turn_and_scored() -> None:
    reference = reference_of(Echo(), Case(7, "x", {}))
    assert reference is not None
    episode = play(Echo(), reference, seed=3)
    assert (episode.score, episode.stop) == (1.0, "done")
    assert [message["content"] for message in episode.messages] == ["a", "7/3: a", "b", "7/3: b", "right"]


class Numbered:
    """Knows its answers by the columns of the rows."""

    def reference(self, n: int, prompt: str) -> str:
        return f"{prompt} {n}"


class Counted:
    def reference(self, index: int) -> str:
        return str(index)


def test_a_reference_gets_what_its_parameters_name() -> None:
    assert reference_of(Numbered(), Case(7, "x", {"prompt": "x", "n": 20})) == Script(("x 20",))
    with pytest.raises(EnvironmentFailed, match=r"Counted.reference has an unknown parameter, index"):
        reference_of(Counted(), Case(7, "x", {"prompt": "x", "n": 20}))


def test_an_episode_ends_where_the_script_or_the_limit_does() -> None:
    short = play(Echo(), Script(("a",)))
    assert (short.stop, short.score, len(short.turns)) == ("out_of_replies", 0.0, 1)
    limited = play(Echo(), EMPTY, rl_max_turns=2)
    assert (limited.stop, limited.score, len(limited.turns)) == ("max_turns", 0.0, 2)


def test_a_policy_sees_the_conversation_and_may_be_async() -> None:
    seen: list[Conversation] = []

    async def policy(conversation: Conversation) -> Any:
        seen.append(conversation)
        return conversation.turn("x") if conversation.answers < 2 else None

    play(Echo(), policy)
    assert [len(conversation.messages) for conversation in seen] == [0, 2, 4]
    assert seen[0].prompt == [{"role": "user", "content": "begin"}]


def test_a_failure_is_in_the_result_and_no_score() -> None:
    class Raises(Echo):
        def episode(self, case_idx: int, seed: int) -> Generator[str | None, str, float]:
            yield None
            raise ValueError("no")

    episode = play(Raises(), EMPTY)
    assert (episode.score, episode.stop) == (None, "env_error")
    assert episode.failure is not None
    assert episode.failure.kind == "raised"


class Shop:
    """A tool for one episode, and an opening."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return []

    def start(self) -> Shop:
        return Shop()

    bought = 0

    def opening(self) -> str:
        return "Hello."

    def get_tools(self) -> list[Callable[..., Any]]:
        return [self.buy]

    def buy(self, count: int) -> str:
        """Buy."""
        self.bought += count
        return f"{self.bought} bought"

    def step(self, reply: str) -> None:
        return None

    def score(self) -> float:
        return self.bought / 10


def test_tool_calls_in_replies_are_run() -> None:
    call = '<tool_call>{"name": "buy", "arguments": {"count": 4}}</tool_call>'
    episode = play(Shop(), Script((call, call, "done")))
    assert episode.score == 0.8
    assert [message["role"] for message in episode.messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert episode.messages[0]["tool_calls"][0]["function"] == {"name": "buy", "arguments": {"count": 4}}
    assert episode.conversation.prompt == [{"role": "user", "content": "begin\n\nHello."}]


def test_many_episodes_are_played_at_the_same_time_in_processes_as_well() -> None:
    prompt = [{"role": "user", "content": "begin"}]
    row = {"prompt": prompt}
    last = ["right" if n % 2 else "wrong" for n in range(6)]
    plays = [Play(Case(n, prompt, row, n), Script(("a", "b", word))) for n, word in enumerate(last)]
    for isolation in ("thread", "process"):
        with closing(Player(Echo(), TrainConfig(rl_env_isolation=isolation))) as player:
            assert [episode.score for episode in player.play(plays)] == [0.0, 1.0] * 3


class Simulated:
    """A rollout whose user is simulated by the policy, in a conversation that is not trained."""

    async def rollout(self, endpoint: Any) -> float:
        wish = await endpoint.chat([{"role": "user", "content": "Wish for something."}], trained=False)
        asked = [{"role": "user", "content": f"A wish: {wish['content']!r}"}]
        answer = await endpoint.chat(asked)
        return float(answer["content"] == "granted")

    def build_dataset(self) -> list[dict[str, Any]]:
        return []


def test_a_script_answers_the_trained_conversation_only() -> None:
    episode = play(Simulated(), Script(("granted",)))
    assert (episode.score, episode.stop, len(episode.turns)) == (1.0, "done", 1)
    assert episode.conversation.prompt == [{"role": "user", "content": "A wish: ''"}]
