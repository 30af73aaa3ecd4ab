"""Episodes with a scripted engine: what ends them, what is trained, what they remember."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import Any

import pytest

from aitrain.engines.batching import BatchingEngine
from aitrain.engines.sampling import Sampling
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.engine import Completion, GenerationRequest
from tests.rollout.scripted import END, Asks, Letters, Limits, Scripted, cases, play, text, trained
from tests.served.environments import Objects

Talk = Generator[str | None, str, float]


class Counts(Asks):
    """Asks for one more, three times."""

    concurrent = True

    def episode(self, case_idx: int) -> Talk:
        said = yield None
        for _ in range(2):
            said += yield "more"
        return min(1.0, len(said) / 10)


def test_what_the_policy_samples_is_trained_and_what_the_environment_says_is_not() -> None:
    engine = Scripted(lambda so_far: f"{so_far.count('more')}$")
    (episode,) = play(Counts(), engine)
    trajectory = episode.trajectory
    assert text(trajectory.prompt_ids) == "u:0?$a:"
    assert text(trajectory.ids) == "0$u:more$a:1$u:more$a:2$"
    assert trained(trajectory) == "0$1$2$"
    assert [value != 0 for value in trajectory.logprobs] == list(map(bool, trajectory.mask))
    assert (episode.stop, episode.result.score) == ("done", 0.3)
    seeds = [request.seed for request in engine.requests]
    assert [seed and (seed.seed, seed.position) for seed in seeds] == [(100, 0), (100, 2), (100, 4)]
    (strings,) = play(Counts(), Scripted(lambda _: "x$"), of=cases(1, chat=False))
    assert text(strings.trajectory.prompt_ids + strings.trajectory.ids) == "0?x$morex$morex$"


@pytest.mark.parametrize(
    ("limits", "stop", "turns"),
    [
        (Limits(9, 99), "done", 3),
        (Limits(2, 99), "max_turns", 2),
        (Limits(9, 3), "max_tokens", 3),
        (Limits(9, 99, episode_tokens=17), "truncated", 1),
        (Limits(9, 99, context=24), "truncated", 1),
    ],
)
def test_what_ends_an_episode(limits: Limits, stop: str, turns: int) -> None:
    (episode,) = play(Counts(), Scripted(lambda _: "abcdefg$"), limits)
    assert (episode.stop, len(episode.trajectory.turns)) == (stop, turns)
    assert episode.is_truncated == (stop != "done")


def test_an_episode_that_begins_after_its_deadline_is_closed() -> None:
    may_begin = threading.Event()

    class Late(Objects):
        def start(self, case_idx: int) -> Any:
            may_begin.wait(60)
            return super().start(case_idx)

    environment = Late()
    (episode,) = play(environment, Scripted(lambda _: "x$"), rl_env_timeout=0.1)
    assert episode.stop == "env_timeout"
    assert not environment.closed.acquire(blocking=False)
    may_begin.set()
    assert environment.closed.acquire(timeout=60)


PLACES: dict[str, tuple[float | None, str, str | None]] = {
    "start": (None, "env_error", "start"),
    "get_tools": (None, "env_error", "start"),
    "step": (None, "env_error", "step"),
    "said": (None, "env_error", "step"),
    "score": (None, "env_error", "score"),
    "none": (None, "done", None),
    "close": (0.5, "done", None),
}
"""Where an episode is ill, with its score, its stop and the place of its failure."""


class Ill(Asks):
    """Raises, or returns something wrong, in the place that the case chooses."""

    def __init__(self, place: str = "") -> None:
        self.place = place

    def start(self, case_idx: int) -> Any:
        episode = Ill([*PLACES][case_idx])
        episode.fail("start")
        return episode

    def fail(self, here: str) -> None:
        if self.place == here:
            raise RuntimeError(f"ill at {here}")

    def get_tools(self) -> list[Any]:
        self.fail("get_tools")
        return []

    def step(self, reply: str) -> Any:
        self.fail("step")
        return 5 if self.place == "said" else None

    def score(self) -> float | None:
        self.fail("score")
        return None if self.place == "none" else 0.5

    def close(self) -> None:
        self.fail("close")


def test_an_episode_that_fails_anywhere_is_missing_data() -> None:
    episodes = play(Ill(), Scripted(lambda _: "x$"), of=cases(len(PLACES)))
    failures = dict(zip(PLACES, (episode.result.failure for episode in episodes), strict=True))
    found = [(one.result.score, one.stop, failure and failure.place)
             for one, failure in zip(episodes, failures.values(), strict=True)]  # fmt: skip
    assert found == [*PLACES.values()]
    assert not any(episode.is_truncated for episode in episodes)
    assert 'raise RuntimeError(f"ill at {here}")' in str(failures["step"])
    assert "responded with 5 (int), which is neither text nor messages" in str(failures["said"])


# -- rounds


class Rounds(BatchingEngine):
    """Answers a batch, and notes its rows."""

    def __init__(self, context: int | None = None) -> None:
        super().__init__(END, context)
        self.rounds: list[tuple[list[str], int]] = []

    def sample(self, rows: list[GenerationRequest], sampling: Sampling, max_tokens: int) -> list[Completion]:
        self.rounds.append(([text(row.prompt_ids) for row in rows], max_tokens))
        return [Completion([ord("x")] * max_tokens) for _ in rows]


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda made: made[1:], ValueError),  # instead of waiting for the rest
        (lambda made: [made[0], *(Completion(None) for _ in made[1:])], TypeError),  # after some were handed out
    ],
)
def test_a_batch_that_fails_ends_the_rollout_with_its_error_and_leaves_no_session_open(
    spoil: Any, error: type[Exception]
) -> None:
    class Fails(Rounds):
        def sample(self, rows: list[GenerationRequest], sampling: Sampling, max_tokens: int) -> list[Completion]:
            made: list[Completion] = spoil(super().sample(rows, sampling, max_tokens))
            return made

    environment = Objects()
    with pytest.raises(error):
        play(environment, Fails(), of=cases(3))
    assert all(environment.closed.acquire(blocking=False) for _ in range(3))


def test_a_round_has_every_live_episode_in_the_order_of_their_cases() -> None:
    class Some(Counts):
        def episode(self, case_idx: int) -> Talk:
            yield None
            for _ in range(case_idx % 3):
                yield "more"
            return 1.0

    engine = Rounds()
    play(Some(), engine, Limits(9, 2), of=cases(6))
    assert [[int(row.partition("?")[0][2:]) for row in rows] for rows, _ in engine.rounds] == [
        [0, 1, 2, 3, 4, 5], [1, 2, 4, 5], [2, 5]
    ]  # fmt: skip


def test_a_completion_is_continued_in_the_next_round_where_a_longer_row_left_it_no_room() -> None:
    class Long(Counts):
        def episode(self, case_idx: int) -> Talk:
            yield "y" * 20 if case_idx else None
            return 1.0

    engine = Rounds(context=40)
    short, long = play(Long(), engine, Limits(1, 30, context=40), of=cases(2))
    assert len(long.trajectory.prompt_ids) + len(long.trajectory.ids) == 40
    assert len(short.trajectory.ids) == 30
    assert [max_tokens for _, max_tokens in engine.rounds] == [
        40 - len(long.trajectory.prompt_ids),
        30 - len(long.trajectory.ids),
    ]
    assert len(short.trajectory.turns) == 1


def test_a_rank_without_episodes_takes_part_in_the_rounds_of_the_others_with_their_longest_row() -> None:
    left = [3, 3, 3, 0]

    async def nothing() -> list[tuple[list[str], int]]:
        engine = Rounds(context=40)
        engine._over_ranks = lambda *_: [left.pop(0), 35, 30]  # type: ignore[method-assign]
        async with engine.batch(0):
            pass
        return engine.rounds

    assert asyncio.run(nothing()) == [(["$"] * 3, 5)] * 3


# -- the chat format


class Dated(Letters):
    """A template that begins with the date."""

    day = "Monday"

    def apply_chat_template(self, conversation: list[Any], add_generation_prompt: bool = False, **_: Any) -> str:
        return f"{self.day} {super().apply_chat_template(conversation, add_generation_prompt)}"


def test_a_template_with_a_date_is_appended_to_after_midnight_too() -> None:
    tokenizer = Dated()
    chat = ChatFormat(tokenizer)
    said = [{"role": "user", "content": "more"}]
    before = chat.following_ids(said, [ord("$")], is_chat=True)
    tokenizer.day = "Tuesday"
    assert chat.following_ids(said, [ord("$")], is_chat=True) == before
    assert text(before) == "u:more$a:"


def test_a_prompt_that_was_changed_in_place_is_rendered_anew() -> None:
    chat, prompt = ChatFormat(Letters()), [{"role": "user", "content": "one"}]
    before, ids = chat.render_prompt(prompt)
    ids.clear()  # belongs to one episode
    assert chat.render_prompt(prompt) == (before, chat.prompt_ids(prompt))
    prompt[0]["content"] = "two"
    changed, ids = chat.render_prompt(prompt)
    assert "two" in changed
    assert text(ids) == changed


def test_what_no_tokenizer_accepts_is_replaced() -> None:
    assert text(ChatFormat(Letters()).prompt_ids("a\udc00")) == "a\ufffd"


# -- many episodes


def test_episodes_at_once_limits_how_many_are_open() -> None:
    """The others begin when these have been closed."""
    open_now, most = set[int](), list[int]()

    class Counted(Objects):
        def start(self, case_idx: int) -> Any:
            open_now.add(case_idx)
            most.append(len(open_now))

            one = super().start(case_idx)
            one.close = lambda: open_now.discard(case_idx)
            return one

    episodes = play(Counted(), Scripted(lambda _: "x$"), of=cases(5), rl_env_episodes=2)
    assert max(most) == 2
    assert [(episode.case.case_idx, episode.result.score) for episode in episodes] == [(n, 1.0) for n in range(5)]
