"""Episodes that the environment begins, on a scripted engine: what is shown, what is trained, what is remembered."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from aitrain import ToolResult
from aitrain.environment.contract import Case
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.limits import Limits
from aitrain.training.episode_record import episode_record
from tests.rollout import asking
from tests.rollout.scripted import Letters, Scripted, cases, play

SYSTEM = {"role": "system", "content": "s"}


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


class Spoken:
    """Says its number first, and that it was right."""

    def __init__(self, number: int) -> None:
        self.number, self.said = number, list[str]()

    def opening(self) -> str:
        return f"{self.number}!"

    def step(self, reply: str) -> str | None:
        self.said.append(reply)
        return "more" if len(self.said) == 1 else None

    def score(self) -> float:
        return float(len(self.said) == 2)


class Speaks:
    def build_dataset(self) -> list[Any]:
        return []

    def start(self, case_idx: int, seed: int) -> Any:
        return Spoken(case_idx)


def of(*prompts: Any) -> list[Case]:
    return [Case(number, prompt, {"word": "x"}, number) for number, prompt in enumerate(prompts)]


def test_the_opening_is_in_the_prompt_and_not_among_the_trained_tokens() -> None:
    silent, joined, strings = [
        play(Speaks(), Scripted(lambda _: "x$"), of=of(prompt))[0]
        for prompt in ([], [SYSTEM, {"role": "user", "content": "q"}], "q ")
    ]

    assert text(silent.trajectory.prompt_ids) == "u:0!$a:"
    assert text(joined.trajectory.prompt_ids) == "s:s$u:q\n\n0!$a:"
    assert text(strings.trajectory.prompt_ids) == "q 0!"
    for trajectory in (silent.trajectory, joined.trajectory):
        assert text(trajectory.ids) == "x$u:more$a:x$"
        assert text([token for token, own in zip(trajectory.ids, trajectory.mask, strict=True) if own]) == "x$x$"
    assert [episode.result.score for episode in (silent, joined, strings)] == [1.0, 1.0, 1.0]
    record = episode_record(silent, 1, 0)
    assert record.prompt == []
    asked, said = record.transcript()
    assert [message.text for message in asked] == ["0!"]
    assert [(message.role, message.text) for message in said] == [
        ("assistant", "x"), ("user", "more"), ("assistant", "x")
    ]  # fmt: skip


class Strict(Letters):
    """A template that wants user and assistant in turns, and one of the user at least."""

    def apply_chat_template(self, conversation: list[Any], add_generation_prompt: bool = False, **options: Any) -> str:
        roles = [message["role"] for message in conversation if message["role"] != "system"]
        if not roles or any(role != ("user", "assistant")[place % 2] for place, role in enumerate(roles)):
            raise ValueError(f"roles must alternate: {roles}")
        return super().apply_chat_template(conversation, add_generation_prompt, **options)


@pytest.mark.parametrize("prompt", [[], [SYSTEM], [SYSTEM, {"role": "user", "content": "q"}]])
def test_a_strict_template_takes_an_opening_after_any_prompt(prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.rollout.scripted.ChatFormat", lambda _: ChatFormat(Strict()))
    (episode,) = play(Speaks(), Scripted(lambda _: "x$"), of=of(prompt))
    assert (episode.stop, episode.result.score) == ("done", 1.0)


def test_a_prompt_that_leaves_no_room_is_dropped_and_no_failure() -> None:
    closed = list[int]()

    class Wordy(Spoken):
        def opening(self) -> str:
            return "y" * (100 if self.number == 1 else 1)

        def score(self) -> float:
            assert self.number != 1
            return 0.5

        def close(self) -> None:
            closed.append(self.number)

    class Long(Speaks):
        def start(self, case_idx: int, seed: int) -> Any:
            return Wordy(case_idx)

    episodes = play(Long(), Scripted(lambda _: "x$"), Limits(9, 9, context=40), of=cases(3))

    assert [(episode.stop, episode.result.score) for episode in episodes] == [
        ("done", 0.5), ("no_room", None), ("done", 0.5)
    ]  # fmt: skip
    assert episodes[1].too_long == len("u:1?\n\n$a:") + 100
    assert episodes[1].result.failure is None
    assert sum(episodes[1].trajectory.mask) == 0
    assert sorted(closed) == [0, 1, 2]


# -- results that end the episode


def test_episodes_at_once_limits_how_many_are_open() -> None:
    """The others begin when these have been closed, and have their own seeds."""
    open_now, most, order = set[int](), list[int](), list[int]()

    class Counted(Speaks):
        concurrent = True

        def start(self, case_idx: int, seed: int) -> Any:
            open_now.add(case_idx)
            most.append(len(open_now))
            order.append(seed)
            one = Spoken(case_idx)
            one.close = lambda: open_now.discard(case_idx)  # type: ignore[attr-defined]
            return one

    engine = Scripted(lambda _: "x$")
    episodes = play(Counted(), engine, of=cases(5), rl_env_episodes=2)
    assert max(most) == 2
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert [episode.case.case_idx for episode in episodes] == [0, 1, 2, 3, 4]
    assert [episode.result.score for episode in episodes] == [1.0] * 5
    assert [request.seed and request.seed.seed for request in engine.requests[:4:2]] == [0, 0]

    play(Counted(), Scripted(lambda _: "x$"), of=cases(5))
    assert max(most) == 5


def test_calls_of_score_episode_are_limited_by_episodes_at_once_too() -> None:
    running, most, lock = set[int](), list[int](), threading.Lock()

    class Counts:
        def build_dataset(self) -> list[Any]:
            return []

        def score_episode(self, case_idx: int) -> float:
            with lock:
                running.add(case_idx)
                most.append(len(running))
            threading.Event().wait(0.01)  # others would begin meanwhile
            with lock:
                running.discard(case_idx)
            return 1.0

    assert len(play(Counts(), Scripted(lambda _: "x$"), of=cases(6), rl_env_episodes=2)) == 6
    assert max(most) <= 2


def test_a_result_that_ends_the_episode_is_in_its_conversation_and_not_among_its_tokens() -> None:
    class Support:
        training_template = None
        has_tool_calls = True

        def parse(self, *_: Any) -> None:
            return None

    class Game:
        def build_dataset(self) -> list[Any]:
            return []

        def get_tools(self) -> Any:
            return [self.leave]

        def leave(self) -> ToolResult:
            return ToolResult("out", done=True)

        def score_episode(self, messages: list[Any]) -> float:
            return float(messages[-1]["content"] == "out")

    written = '<tool_call>{"name": "leave"}</tool_call>$'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.rollout.scripted.ChatFormat", lambda _: ChatFormat(Letters(), support=Support()))
        (episode,) = play(Game(), Scripted(lambda _: written))
    assert (episode.stop, episode.result.score, len(episode.trajectory.turns)) == ("done", 1.0, 1)
    assert text(episode.trajectory.ids) == written
    assert [message["role"] for message in episode.messages] == ["assistant", "tool"]


def test_a_step_that_gets_the_calls_and_hangs_is_named_instead_of_a_tool() -> None:
    class Hangs:
        def get_tools(self) -> Any:
            return [{"name": "go"}]

        async def step(self, reply: str, calls: Any) -> str:
            await asyncio.sleep(60)
            return ""

        def score(self) -> float:
            return 1.0

    class Game:
        def build_dataset(self) -> list[Any]:
            return []

        def start(self) -> Any:
            return Hangs()

    episode = asking.play_one(Game(), Scripted(lambda _: '<tool_call>{"name": "go"}</tool_call>$'), rl_env_timeout=0.1)
    assert episode.failure_message.startswith("step of case 0 timed out")
