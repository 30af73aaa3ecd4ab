"""`rollout`: the environment's own code asks the policy, and every answer in its conversation is trained."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from aitrain import EpisodeTruncated, Score
from tests.rollout.scripted import Asks, Limits, Scripted, cases, play_one, play_with_notes, text, trained, user
from tests.test_speaking_first import Gym


def echo() -> Scripted:
    """Answers with the number of questions so far."""
    return Scripted(lambda so_far: f"{so_far.count('u:')}$")


CALCULATOR = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Twice(Asks):
    """Asks for one more, once."""

    async def rollout(self, case: dict[str, Any], endpoint: Any) -> Score:
        messages = [user(f"first {case['word']}")]
        messages.append(await endpoint.chat(messages))
        answer = await endpoint.chat([*messages, user("more")])
        return Score(0.5, {"last": float(answer["content"])})


class TwiceInAThread(Asks):
    """The same without async, and called by signature."""

    def rollout(self, case_idx: int, prompt: Any, word: str, endpoint: Any) -> Score:
        assert prompt == [user(f"{case_idx}?")]
        messages = [user(f"first {word}")]
        messages.append(endpoint.chat(messages))
        answer = endpoint.chat([*messages, user("more")])
        return Score(0.5, {"last": float(answer["content"])})


@pytest.mark.parametrize("environment", [Twice(), TwiceInAThread()])
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_the_answers_are_trained_and_what_the_rollout_says_is_not(environment: Any, isolation: Any) -> None:
    rows = [replace(case, row={"word": f"w{case.number}"}) for case in cases(3)]
    episodes, _ = play_with_notes(environment, echo(), of=rows, rl_env_isolation=isolation)
    for number, episode in enumerate(episodes):
        assert text(episode.trajectory.prompt_ids) == f"u:first w{number}$a:"
        assert text(episode.trajectory.ids) == "1$u:more$a:2$"
        assert trained(episode.trajectory) == "1$2$"
        assert (episode.stop, episode.result.score, episode.result.metrics) == ("done", 0.5, {"last": 2.0})
        assert episode.conversation[0] == user(f"first w{number}")


class Addressed(Asks):
    """As if a client asked its address, with the variable of a key, as the adapter verifiers has it."""

    def rollout(self, endpoint: Any) -> float:
        assert endpoint.base_url.startswith("http://127.0.0.1:")
        os.environ["AITRAIN_ENDPOINT_KEY"] = endpoint.api_key
        endpoint.chat([user("ready?")])
        return 1.0


def test_the_address_of_an_episode_changes_nothing_that_others_see(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("no_proxy", ""), ("NO_PROXY", "judge.example"), ("AITRAIN_ENDPOINT_KEY", "")):
        monkeypatch.setenv(name, value)

    episodes, notes = play_with_notes(Addressed(), Scripted(lambda _: "ok$"), of=cases(4), rl_env_isolation="thread")

    assert ([episode.result.score for episode in episodes], notes) == ([1.0] * 4, [])
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "judge.example,127.0.0.1"


# -- other conversations


class Simulated(Asks):
    """A user who is the policy as well: speaks first, and once more."""

    async def rollout(self, endpoint: Any) -> float:
        wish = await endpoint.chat([user("what do you want?")], trained=False)
        messages = [user(f"I want {wish['content']}")]
        messages.append(await endpoint.chat(messages))
        asked = [endpoint.chat([user(f"good? {n}")], trained=False) for n in range(3)]
        opinions = "".join(answer["content"] for answer in await asyncio.gather(*asked))
        await endpoint.chat([*messages, user(opinions)])
        return 1.0


def answer_by_question(so_far: str) -> str:
    question = so_far.rpartition("u:")[2]
    return "a room$" if "want?" in question else "yes$" if "good?" in question else "ok$"


def test_untrained_conversations_are_not_part_of_the_trajectory() -> None:
    engine = Scripted(answer_by_question)
    episode = play_one(Simulated(), engine)
    seeds = [request.seed for request in engine.requests]
    assert text(episode.trajectory.prompt_ids + episode.trajectory.ids) == "u:I want a room$a:ok$u:yesyesyes$a:ok$"
    assert trained(episode.trajectory) == "ok$ok$"
    assert len(set(seeds)) == len(seeds) == 6
    assert [(seed.seed, seed.position) for seed in seeds if seed and seed.seed == 100] == [(100, 0), (100, 3)]


# -- limits


class Endless(Asks):
    """Asks until it cannot, in a conversation of its own as well."""

    catches = True

    async def rollout(self, endpoint: Any) -> float:
        messages = [user("go")]
        with suppress(EpisodeTruncated):
            await endpoint.chat([user("x" * 100)], trained=False)
            return 1.0
        try:
            while True:
                messages.append(await endpoint.chat(messages))
                messages.append(user("on"))
        except EpisodeTruncated as error:
            if not self.catches:
                raise ValueError("it was cut off") from error
            opinion = await endpoint.chat([user("was it good?")], trained=False)
            return 0.25 if opinion["content"] == "yes" and "--rl-max" in str(error) else 0.0


@pytest.mark.parametrize(
    ("limits", "catches", "bounds", "stop", "score"),
    [
        (Limits(3, 9, context=99), True, "0,1", "max_turns", 0.25),
        (Limits(9, 9, 12, context=99), True, "0,1", "truncated", 0.25),
        (Limits(2, 9, context=99), False, "1,2", "max_turns", 1.0),
    ],
)
def test_a_limit_raises_in_the_rollout_and_the_score_is_what_it_returns_then_or_the_lowest(
    limits: Limits, catches: bool, bounds: str, stop: str, score: float
) -> None:
    environment = Endless()
    environment.catches = catches
    engine = Scripted(lambda so_far: "yes$" if "good?" in so_far else "x$")
    episode = play_one(environment, engine, limits, rl_score_range=bounds)
    assert (episode.stop, episode.result.score, episode.result.failure) == (stop, score, None)
    assert "good" not in text(episode.trajectory.ids)


class Deaf(Asks):
    """Ignores EpisodeTruncated and sends the next request."""

    async def rollout(self, endpoint: Any) -> float:
        messages = [user("go")]
        while True:
            with suppress(EpisodeTruncated):
                messages += [await endpoint.chat(messages), user("on")]


def test_a_rollout_that_asks_again_and_again_after_its_limit_fails() -> None:
    failure = play_one(Deaf(), Scripted(lambda _: "x$"), Limits(1, 9, context=99)).result.failure
    assert "after EpisodeTruncated" in failure.message


class RaisesAtItsLimit(Asks):
    """Has a mistake in what it does when it is cut off."""

    def rollout(self, endpoint: Any) -> float:
        try:
            return float(endpoint.chat([user("go"), endpoint.chat([user("go")]), user("on")]))
        except EpisodeTruncated:
            return {}["score"]


class GeneratorRaisesAtItsLimit(Asks):
    rollout = None

    def episode(self) -> Generator[str | None, str, float]:
        try:
            yield None
            yield "on"
        except GeneratorExit:
            return {}["score"]
        return 1.0


@pytest.mark.parametrize("environment", [RaisesAtItsLimit(), GeneratorRaisesAtItsLimit()])
def test_a_mistake_in_the_score_of_a_cut_episode_is_missing_data(environment: Any) -> None:
    result = play_one(environment, Scripted(lambda _: "x$"), Limits(1, 9, context=99)).result
    assert (result.score, result.failure and result.failure.kind) == (None, "raised")


# -- mistakes


class Mistake(Asks):
    """Asks twice, with what a mistake makes of the second request."""

    concurrent = True

    def __init__(self, second: Any) -> None:
        self.second = second

    def rollout(self, endpoint: Any) -> float:
        first = [user("one")]
        answer = endpoint.chat(first, tools=[CALCULATOR])
        try:
            endpoint.chat(**self.second(first, answer))
        except ValueError as error:  # the episode fails all the same
            self.told = str(error)
        return 1.0


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (lambda first, answer: {"messages": [user("One"), answer, user("two")]}, "rewrote messages[0]: it was {'role'"),
        (lambda first, answer: {"messages": [*first, {**answer, "content": "other"}, user("two")]},
         "rewrote messages[1]: it was {'role': 'assistant'"),
        (lambda first, answer: {"messages": [*first, answer, user("two")], "tools": []}, "changed the tools"),
    ],
)  # fmt: skip
def test_a_conversation_that_is_rewritten_fails_with_what_was_rewritten(second: Any, message: str) -> None:
    mistake = Mistake(second)
    episode = play_one(mistake, echo())
    assert mistake.told.startswith(message)
    assert episode.stop == "env_error"
    assert episode.failure_message.startswith(f"rollout of case 0 {message}")
    assert "trained=False" in episode.failure_message


# -- tools


class Calculator(Asks):
    """Runs the policy's calls by itself."""

    async def rollout(self, endpoint: Any) -> Score:
        messages = [user("1+2?")]
        answer = await endpoint.chat(messages, tools=[CALCULATOR])
        (call,) = answer["tool_calls"]
        result = str(sum(json.loads(call["function"]["arguments"]).values()))
        said = {"role": "tool", "tool_call_id": call["id"], "content": result}
        last = await endpoint.chat([*messages, answer, said])
        return Score(1.0 if last["content"] == "3" else 0.0)


def test_calls_of_the_policy_reach_the_rollout_and_its_results_the_policy() -> None:
    call = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    engine = Scripted(lambda so_far: "3$" if "t:3$" in so_far else f"<tool_call>{call}</tool_call>$")
    episode = play_one(Calculator(), engine, Limits(2, 99))

    assert (episode.result.score, episode.tool_calls, episode.wrong_tool_calls) == (1.0, 1, 0)
    assert episode.messages[1]["content"] == "3"
    assert episode.reset.tools == (CALCULATOR,)


@pytest.mark.parametrize("environment", [Calculator(), Gym()])
def test_a_call_that_cannot_be_read_counts_as_wrong_whoever_gets_it(environment: object) -> None:
    episode = play_one(environment, Scripted(lambda _: '<tool_call>{"name": "move", </tool_call>$'), Limits(1, 99))
    assert (episode.tool_calls, episode.wrong_tool_calls) == (1, 1)


class Agent(Asks):
    """Answers each call, as agents do, also one that it cannot read."""

    async def rollout(self, endpoint: Any) -> float:
        messages = [user("go")]
        messages.append(await endpoint.chat(messages, tools=[CALCULATOR]))
        called = messages[-1]["tool_calls"]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "which?"} for call in called]
        await endpoint.chat(messages)
        return 1.0


def test_a_call_that_cannot_be_read_may_be_answered() -> None:
    engine = Scripted(lambda so_far: "sorry$" if "t:which?" in so_far else "<tool_call>{add</tool_call>$")
    episode = play_one(Agent(), engine, Limits(2, 99))
    assert (episode.failure_message, episode.stop, episode.result.score) == ("", "done", 1.0)
