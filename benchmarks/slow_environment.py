"""What waiting for the environment costs: 64 episodes whose scoring takes 0.1 s, against one after the other.

Environments that change nothing, as functions and with async, and ones that hold what judges hold: an HTTP client,
also one that is made when it is needed, a logger, a lock, a function with a cache. In processes there is no bound.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import httpx

from aitrain.environment.contract import Case, Transcript
from aitrain.environment.runner import start_runner
from aitrain.options.train import TrainConfig
from benchmarks.measuring import Asked, Figure, ratio
from tests import runner_calls

EPISODES, SECONDS = 64, 0.1
MOST = 1 / 30

TEXTS = [f"answer {number}" for number in range(EPISODES)]
CASES = [Case(number, "question", {"prompt": "question"}) for number in range(EPISODES)]

Scores = list[float | None]


class Nothing:
    """What an environment holds that changes nothing."""

    def use(self, text: str) -> None:
        """At the beginning of each call."""


class Client(Nothing):
    def __init__(self) -> None:
        self.client = httpx.Client()

    def use(self, text: str) -> None:
        self.client.headers["x-case"] = text


class LateClient(Nothing):
    client: httpx.Client | None = None

    def use(self, text: str) -> None:
        if self.client is None:
            self.client = httpx.Client()


class Logger(Nothing):
    def __init__(self) -> None:
        self.logger = logging.getLogger(__name__)

    def use(self, text: str) -> None:
        self.logger.debug("scoring %s", text)


class Lock(Nothing):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def use(self, text: str) -> None:
        with self.lock:
            len(text)


class Cache(Nothing):
    def use(self, text: str) -> None:
        length(text)


@functools.lru_cache
def length(text: str) -> int:
    """One whose results are kept."""
    return len(text)


HELD = {
    "nothing changes": Nothing, "an HTTP client": Client, "a client made when needed": LateClient, "a logger": Logger,
    "a lock": Lock, "lru_cache": Cache,
}  # fmt: skip


class Slow(Nothing):
    """Waits, as for another machine, and scores."""

    def score_episode(self, text: str) -> float:
        self.use(text)
        time.sleep(SECONDS)
        return score(text)


class SlowAsync:
    """The same, written with async."""

    async def score_episode(self, text: str) -> float:
        await asyncio.sleep(SECONDS)
        return score(text)


def holding(environment: type, held: type) -> Any:
    """An environment whose class holds this, too."""
    return type(
        f"{environment.__name__}{held.__name__}", (environment,) if held is Nothing else (held, environment), {}
    )()


def score(text: str) -> float:
    """Another one for each episode."""
    return TEXTS.index(text) / EPISODES


def measure(asked: Asked) -> Iterator[Figure]:
    """Measure each of them and the loop of a reward function in turn."""
    environments = {name: holding(Slow, held) for name, held in HELD.items()} | {"async": SlowAsync()}
    with ExitStack() as stack:
        sides = {"in processes": stack.enter_context(hosted(Slow(), "process"))}  # forked while there are few threads
        sides |= {name: stack.enter_context(hosted(environment)) for name, environment in environments.items()}
        for side in sides.values():
            side()  # makes the threads and processes, which live as long as a run, and watches the first calls
        sides["one by one"] = one_by_one
        taken = [{name: timed(side) for name, side in sides.items()} for _ in range(asked.pairs)]
    for name in (*environments, "in processes"):
        most = math.inf if name == "in processes" else MOST
        ours, theirs = ([each[side] for each in taken] for side in (name, "one by one"))
        yield ratio(f"score_episode of {SECONDS:g} s, {name}: seconds", ours, theirs, most)


def timed(side: Callable[[], Scores]) -> float:
    """Seconds for all episodes, each of which must have its own score."""
    start = time.perf_counter()
    scores = side()
    seconds = time.perf_counter() - start
    if scores != [score(text) for text in TEXTS]:
        raise RuntimeError("an episode has not its own score: the times cannot be compared")
    return seconds


@contextmanager
def hosted(environment: Any, isolation: str = "thread") -> Iterator[Callable[[], Scores]]:
    """Scoring as the trainer has it done."""
    completions = [Transcript(case, text) for case, text in zip(CASES, TEXTS, strict=True)]

    def score_all() -> Scores:
        plays = runner_calls.open_sessions(runner, CASES, range(EPISODES))
        scored = runner_calls.score(runner, plays, completions)
        runner_calls.end(runner, plays)
        return [one.score for one in scored]

    config = TrainConfig(rl_env_isolation=isolation, rl_env_workers=EPISODES)
    with closing(start_runner(environment, config)) as runner:
        yield score_all


def one_by_one() -> Scores:
    """As a reward function scores its completions where nobody thought of more: in a loop."""
    environment = Slow()
    return [environment.score_episode(text) for text in TEXTS]
