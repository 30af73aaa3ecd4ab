"""The environment's side of an episode: generators, objects, tools, and what limits and mistakes come to."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from aitrain.execution.failure import CallFailed
from tests.rehearsal import call, rehearse


class Rows:
    def build_dataset(self, tokenizer: Any = None) -> list[dict[str, Any]]:
        return [{"prompt": "?"}]


# -- generators


def test_a_generator_that_a_limit_ends_may_say_what_it_is_worth_else_it_is_worth_nothing() -> None:
    class Plain(Rows):
        def episode(self) -> Generator[str | None, str, float]:
            yield None
            yield "go on"
            return 1.0

    class SaysIt(Plain):
        def episode(self) -> Generator[str | None, str, float]:
            try:
                return (yield from super().episode())
            except GeneratorExit:
                return 0.125

    assert rehearse(SaysIt(), ["a"]).scored.score == 0.125
    played = rehearse(Plain(), ["a"])
    assert (played.is_over, played.scored.score) == (False, 0.0)


@pytest.mark.parametrize(
    ("episode", "word"),
    [
        (lambda self: 1.0, "yield"),
        (lambda self: [(yield), (yield)], "None"),
        (lambda self: [(yield), (yield [])], "messages"),
    ],
)
def test_a_generator_that_says_something_odd_is_a_failure_with_advice(episode: Any, word: str) -> None:
    with pytest.raises(CallFailed) as caught:
        rehearse(type("Odd", (Rows,), {"episode": episode})(), ["a"])

    failure = caught.value.failure
    assert failure.kind == "wrong_type"
    assert word in failure.message


def test_a_message_with_calls_of_tools_alone_is_said_as_one_without_text() -> None:
    calls = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {}}}]}
    made = type("Calls", (Rows,), {"episode": lambda self: [(yield), (yield calls)][0] and 1.0})()
    assert rehearse(made, ["a", "b"]).moves[0].messages == ({"content": "", **calls},)


# -- objects


@pytest.mark.parametrize(("begun", "missing"), [(None, "step"), (type("Mute", (), {"step": print})(), "score")])
def test_a_start_without_return_or_score_is_told_before_the_model_is_asked(begun: Any, missing: str) -> None:
    with pytest.raises(CallFailed, match=f"returned .*, which has no {missing}"):
        rehearse(type("Forgets", (Rows,), {"start": lambda self: begun})(), [])


class Counter:
    """Wants `goal` answers; its tool counts some at once."""

    def __init__(self, goal: int) -> None:
        self.goal, self.count = goal, 0

    async def step(self, reply: str) -> str | None:
        self.count += 1
        return None if self.count >= self.goal else f"{self.count} of {self.goal}"

    def score(self) -> float:
        return min(1.0, self.count / self.goal)

    def get_tools(self) -> list[Any]:
        return [self.skip]

    def skip(self, steps: int) -> dict[str, int]:
        """Skip some steps.

        Args:
            steps: How many.
        """
        self.count += steps
        return {"count": self.count}


class Counting(Rows):
    async def start(self, case_idx: int, seed: int) -> Counter:
        return Counter(goal=seed)


def test_an_object_steps_until_it_says_nothing_and_its_tools_change_its_state() -> None:
    played = rehearse(Counting(), [call("skip", steps=2) + call("skip", steps=1), "a", "b", "c"], seed=5)

    assert played.moves[0].messages == (
        {"role": "tool", "name": "skip", "content": '{"count": 2}'},
        {"role": "tool", "name": "skip", "content": '{"count": 3}'},
    )
    assert played.moves[0].wrong_calls == 0
    assert [move.messages for move in played.moves[1:]] == [({"role": "user", "content": "4 of 5"},), ()]
    assert played.scored.score == 1.0
