"""Episodes that do not wait for each other, as with a vLLM server: the same episodes as in rounds."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from aitrain import TrainConfig
from aitrain.engines import live_servers
from aitrain.engines.batching import BatchingEngine, BatchRow
from aitrain.engines.weight_sync import AdapterSync
from aitrain.environment.contract import Case
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.rollout.chat_format import ChatFormat, format_for_episodes
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.engine import Completion, Decoding, GenerationRequest, Leave
from aitrain.rollout.episode import Episode, Rollout
from aitrain.rollout.limits import EndOfTurn, Limits
from aitrain.training.episode_record import episode_record
from aitrain.training.model import TINY_MODEL
from tests.training.test_served import END, Fake, adapted, by, load, run

CASES = [Case(n, [{"role": "user", "content": f"say {n}:"}], {"prompt": ""}) for n in range(12)]
LIMITS = Limits(turns=4, turn_tokens=6, episode_tokens=60, context=512)
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

    def __init__(self, clock: RolloutClock | None = None) -> None:
        self.clock = clock or RolloutClock()

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
            time.sleep(random.uniform(0, 0.01))
            if (case_idx, turn) == (8, 1):
                raise ValueError("no more")
            said += yield f" more {seed}? "
        return said.count("a") / len(said)


class Tools:
    """One that looks things up, for answers with an a."""

    def build_dataset(self) -> list[Any]:
        return []

    def start(self, case_idx: int) -> Any:
        return OneOf(case_idx)


class OneOf:
    def __init__(self, number: int) -> None:
        self.number, self.said = number, ""

    def step(self, reply: str) -> str | None:
        self.said += reply
        return None if len(self.said) > self.number else "go on "

    def score(self) -> float:
        return min(1.0, self.said.count("a") / 5)


def rollout_of(runner: EnvRunner, engine: Any, limits: Limits = LIMITS) -> Rollout:
    chat = format_for_episodes(ChatFormat(TOKENIZER), ["user"])
    return Rollout(runner, engine, chat, limits, ENDING, clock=engine.clock)


def play(runner: EnvRunner, engine: Any, seeds: Any = None, limits: Limits = LIMITS) -> list[Episode]:
    seeds = [0] * len(CASES) if seeds is None else seeds
    return asyncio.run(rollout_of(runner, engine, limits).play(CASES, seeds))


def in_rounds(limits: Limits = LIMITS) -> InRounds:
    return InRounds(ENDING, limits.context, RolloutClock())


@pytest.fixture
def runner(request: pytest.FixtureRequest) -> Iterator[EnvRunner]:
    options = {"rl_env_timeout": 20.0, **getattr(request, "param", {})}
    with closing(start_runner(Talk(), TrainConfig(**options))) as made:
        yield made


def told(episodes: list[Episode]) -> list[Any]:
    """All of them but the time they took."""
    return [
        (replace(episode_record(episode, 1, 0), seconds=0), *(vars(episode.trajectory)[name] for name in TRAJECTORY))
        for episode in episodes
    ]


TRAJECTORY = ("prompt_ids", "ids", "mask", "logprobs", "turns", "stop")


@pytest.mark.parametrize(
    ("environment", "isolation", "limits"),
    [
        (Talk, "thread", Limits(2, 9)),
        (Talk, "thread", Limits(9, 9, None, 150)),
        (Tools, "thread", LIMITS),
        (Tools, "process", Limits(5, 3, 90)),
    ],
)
def test_the_episodes_are_those_of_rounds(environment: type, isolation: str, limits: Limits) -> None:
    with closing(start_runner(environment(), TrainConfig(rl_env_isolation=isolation))) as runner:
        seeds = range(len(CASES))
        together = play(runner, in_rounds(limits), seeds, limits)
        alone = play(runner, OneByOne(), seeds, limits)
    assert told(alone) == told(together)
    assert len({len(episode.trajectory.turns) for episode in alone}) > 1


def test_an_episode_does_not_wait_for_another_one() -> None:
    """The first one's environment answers only when all others are over; in rounds it would never."""
    over = [threading.Event() for _ in CASES]

    class Last:
        concurrent = True

        def build_dataset(self) -> list[Any]:
            return []

        def episode(self, case_idx: int) -> Generator[str | None, str, float]:
            for turn in range(3):
                if case_idx == 0 and turn == 1:
                    assert all(event.wait(20) for event in over[1:])
                yield "more "
            over[case_idx].set()
            return 1.0

    with closing(start_runner(Last(), TrainConfig(rl_env_timeout=60.0, rl_max_turns=8))) as runner:
        episodes = play(runner, OneByOne(), limits=Limits(8, 6))
    assert [episode.result.score for episode in episodes] == [1.0] * len(CASES)


# -- by HTTP


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(live_servers, "POLL_SECONDS", 0.05)
    server = Fake()
    yield server
    server.stop()


class Dying(Fake):
    """Closes all connections when `patient` requests wait, and is back, without the policy, at the fourth check."""

    patient = 512

    def start(self) -> None:
        super().start()
        self.died, self.held, self.checks = asyncio.Event(), 0, 0

    async def respond(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions" and not self.died.is_set():
            self.held += 1
            if self.held == self.patient:
                self.is_up = False
                self.died.set()
            await self.died.wait()
            raise httpx.ReadError("closed")
        if request.url.path == "/health":
            self.checks += 1
            if self.checks == 4:
                self.is_up, self.adapters = True, {}
        return await super().respond(request)


def test_many_requests_outlive_a_server_that_dies_and_the_event_loop_goes_on_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(live_servers, "POLL_SECONDS", 0.01)
    fake = Dying()
    engine = by(fake, AdapterSync(adapted(), tmp_path / "sync"))
    load(engine, 3)
    done_while_waiting: list[int] = []

    async def environment() -> None:
        while fake.checks < 4:
            done_while_waiting.append(fake.checks)
            await asyncio.sleep(0)

    async def play() -> list[Completion]:
        requests = [GenerationRequest([number], 4) for number in range(fake.patient)]
        completions = asyncio.gather(*map(engine.generate, requests))
        await environment()
        return await completions

    completions = run(play())
    fake.stop()
    assert [completion.ids for completion in completions] == [[number, END] for number in range(fake.patient)]
    assert {1, 2, 3} <= set(done_while_waiting)
    assert (engine.restarts, fake.checks) == (1, 4)  # one request checks, for all of them
    assert len(fake.bodies("/v1/load_lora_adapter")) == 2
    assert len(fake.bodies("/v1/completions")) == fake.patient


def test_an_interrupt_ends_the_wait_for_a_server(fake: Fake) -> None:
    engine = by(fake)
    fake.stop()

    async def interrupted() -> Completion:
        asyncio.get_running_loop().call_later(0.05, signal.raise_signal, signal.SIGINT)
        return await engine.generate(GenerationRequest([1], 4))

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(interrupted())
    finally:
        signal.signal(signal.SIGINT, before)
    fake.start()
    assert run(engine.generate(GenerationRequest([1], 4))).ids == [1, END]
