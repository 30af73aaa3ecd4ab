"""Episodes that do not wait for each other, as with a vLLM server: the same episodes as in rounds."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from aitrain import TrainConfig
from aitrain.engines import server_fleet
from aitrain.engines.batching import BatchingEngine, BatchRow
from aitrain.environment.contract import Case
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.rollout.chat_format import ChatFormat, format_for_episodes
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.engine import Completion, Decoding, GenerationRequest, Leave
from aitrain.rollout.episode import Episode, Rollout
from aitrain.rollout.limits import EndOfTurn, Limits
from aitrain.training.episode_record import episode_record
from aitrain.training.model import TINY_MODEL
from tests.training.test_served import END, Fake, by, run

CASES = [Case(n, [{"role": "user", "content": f"say {n}:"}], {"prompt": ""}) for n in range(12)]
TOKENIZER = AutoTokenizer.from_pretrained(TINY_MODEL)
ENDING = EndOfTurn([TOKENIZER.eos_token_id])


def completion_of(prompt: list[int], max_tokens: int) -> Completion:
    """What this policy answers to a prompt, always the same: letters, mostly with an end."""
    drawn = random.Random(str(prompt))
    letters = TOKENIZER("".join(drawn.choices("abcdef", k=drawn.randint(1, 9))), add_special_tokens=False)["input_ids"]
    ids = [*letters, *ENDING.eos_ids]
    return Completion(ids, [-0.1 * n for n in range(len(ids))]).first(max_tokens)


class InRounds(BatchingEngine):
    """A policy that answers all prompts at the same time."""

    weight_version = 0

    def sample(self, rows: list[BatchRow], max_tokens: int, decoding: Decoding) -> list[Completion]:
        return [completion_of(row.prompt_ids, max_tokens) for row in rows]


class OneByOne:
    """A policy that answers each prompt by itself, after a while."""

    weight_version = 0
    clock = RolloutClock()

    async def generate(self, request: GenerationRequest) -> Completion:
        with self.clock.running("generate"):
            await asyncio.sleep(random.uniform(0, 0.01))
        return completion_of(request.prompt_ids, request.max_tokens)

    @asynccontextmanager
    async def batch(self, episodes: int) -> AsyncIterator[Leave]:
        yield lambda: None


class Talk:
    """Ends after as many turns as the case says; fails where it is told to."""

    def build_dataset(self) -> list[Any]:
        return []

    def episode(self, case_idx: int, seed: int) -> Generator[str | None, str, float]:
        said = yield None
        for turn in range(case_idx % 5):
            if (case_idx, turn) == (8, 1):
                raise ValueError("no more")
            said += yield f" more {seed}? "
        return said.count("a") / len(said)


def play(runner: EnvRunner, engine: Any, limits: Limits) -> list[Episode]:
    chat = format_for_episodes(ChatFormat(TOKENIZER), ["user"])
    rollout = Rollout(runner, engine, chat, limits, ENDING, clock=engine.clock)
    return asyncio.run(rollout.play(CASES, range(len(CASES))))


def told(episode: Episode) -> list[Any]:
    """All of it but the time it took."""
    names = ("prompt_ids", "ids", "mask", "logprobs", "turns", "stop")
    return [replace(episode_record(episode, 1, 0), seconds=0), *(vars(episode.trajectory)[name] for name in names)]


@pytest.mark.parametrize(
    ("isolation", "limits"),
    [("thread", Limits(2, 9)), ("thread", Limits(9, 9, None, 150)), ("process", Limits(5, 3, 90))],
)
def test_the_episodes_are_those_of_rounds(isolation: str, limits: Limits) -> None:
    with closing(start_runner(Talk(), TrainConfig(rl_env_isolation=isolation))) as runner:
        together = play(runner, InRounds(ENDING, limits.context, RolloutClock()), limits)
        alone = play(runner, OneByOne(), limits)
    assert [*map(told, alone)] == [*map(told, together)]
    assert len({len(episode.trajectory.turns) for episode in alone}) > 1


def test_an_episode_does_not_wait_for_another_one() -> None:
    """The first one's environment answers only when all others are over; in rounds it would never."""
    over = [threading.Event() for _ in CASES]

    class Last(Talk):
        concurrent = True

        def episode(self, case_idx: int) -> Generator[str | None, str, float]:  # type: ignore[override]
            for turn in range(3):
                if case_idx == 0 and turn == 1:
                    assert all(event.wait(60) for event in over[1:])
                yield "more "
            over[case_idx].set()
            return 1.0

    with closing(start_runner(Last(), TrainConfig(rl_env_timeout=120.0, rl_max_turns=8))) as runner:
        episodes = play(runner, OneByOne(), Limits(8, 6))
    assert [episode.result.score for episode in episodes] == [1.0] * len(CASES)


def test_an_interrupt_ends_the_wait_for_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_fleet, "POLL_SECONDS", 0.05)
    fake = Fake()
    engine = by(fake)
    fake.stop()

    async def interrupted() -> Completion:
        asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGINT)
        return await engine.generate(GenerationRequest([1], 4))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(interrupted())
        fake.start()
        assert run(engine.generate(GenerationRequest([1], 4))).ids == [1, END]
    finally:
        signal.signal(signal.SIGINT, before)
        fake.stop()
