"""What waiting for the environment costs: 64 episodes at the same time, against one after the other.

`python -m benchmarks.slow_environment [--pairs N]`; exits 1 when a bound is not met. First `score_episode` waits for
0.1 s; then, in real trainers, a tool waits for 0.25 s, against TRL's `environment_factory`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import httpx

from aitrain.environment.contract import Case, Transcript
from aitrain.environment.runner import EnvRunner
from aitrain.execution.processes import ProcessPool
from aitrain.options.train import TrainConfig
from benchmarks.measuring import Bounds, Row, options, show
from benchmarks.overhead import SURROUNDINGS
from tests import runner_calls

EPISODES = 64
SECONDS = 0.1
SCORING, TURNS = Bounds(ratio=1 / 30), Bounds(ratio=1 / 10)

TEXTS = [f"answer {number}" for number in range(EPISODES)]
CASES = [Case(number, "question", {"prompt": "question"}) for number in range(EPISODES)]

Scoring = Callable[[], list[float | None]]
"""Scores all episodes once."""


class Slow:
    """Waits, as for another machine, and scores."""

    def score_episode(self, text: str) -> float:
        """Wait with the thread blocked."""
        time.sleep(SECONDS)
        return score(text)


class SlowAsync:
    """The same, written with async."""

    async def score_episode(self, text: str) -> float:
        """Wait as a coroutine."""
        await asyncio.sleep(SECONDS)
        return score(text)


class SlowJudge(Slow):
    """Holds what judges hold: a client, also one that is made when needed, a logger, a lock, a cached function."""

    def __init__(self) -> None:
        self.client, self.lock, self.logger = httpx.Client(), threading.Lock(), logging.getLogger(__name__)
        self.other: httpx.Client | None = None

    def score_episode(self, text: str) -> float:
        """Use all of them, and wait."""
        self.other = self.other or httpx.Client()
        self.client.headers["x-case"] = text
        self.logger.debug("scoring %s", text)
        with self.lock:
            length(text)
        return super().score_episode(text)


@functools.lru_cache
def length(text: str) -> int:
    """A function with a cache."""
    return len(text)


def score(text: str) -> float:
    """Another one for each episode."""
    return TEXTS.index(text) / EPISODES


def main() -> int:
    """Measure, show, judge."""
    pairs = options("Seconds that a slow environment takes, against one episode after the other.").parse_args().pairs
    os.environ.update(SURROUNDINGS)
    print(f"{EPISODES} episodes, {pairs} pairs\n")
    is_met = show(scoring(pairs), "one by one")
    from benchmarks.slow_tools import per_turn  # which loads torch: the processes above are forked without it

    print()
    return 0 if show(per_turn(EPISODES, pairs, TURNS), "TRL") and is_met else 1


def scoring(pairs: int) -> list[Row]:
    """Both ways to write `score_episode`, what judges hold, and the first one in processes."""
    with ExitStack() as stack:
        environments = (Slow(), SlowAsync(), SlowJudge())
        sides = [stack.enter_context(hosted(environment)) for environment in environments]
        sides += [stack.enter_context(hosted(Slow(), "process"))]
        for side in sides:
            side()  # makes the threads and processes, which live as long as a run, and watches the first calls
        rounds = [[timed(side) for side in (*sides, one_by_one, one_by_one_async)] for _ in range(pairs)]
    ours, ours_async, ours_judge, ours_apart, theirs, theirs_async = zip(*rounds, strict=True)
    return [
        Row(f"score_episode of {SECONDS:g} s: seconds", ours, theirs, SCORING),
        Row("the same, async", ours_async, theirs_async, SCORING),
        Row("with clients, logger, lock, lru_cache", ours_judge, theirs, SCORING),
        Row("the same, in processes", ours_apart, theirs),
    ]


def timed(side: Scoring) -> float:
    """Seconds for all episodes, each of which must have its own score."""
    start = time.perf_counter()
    scores = side()
    seconds = time.perf_counter() - start
    if scores != [score(text) for text in TEXTS]:
        raise RuntimeError("an episode has not its own score: the times cannot be compared")
    return seconds


@contextmanager
def hosted(environment: object, isolation: str = "thread") -> Iterator[Scoring]:
    """Scoring as the trainer has it done."""
    config = TrainConfig(rl_env_isolation=isolation, rl_env_workers=EPISODES)
    apart = ProcessPool.start(environment) if isolation == "process" else None
    completions = [Transcript(case, text) for case, text in zip(CASES, TEXTS, strict=True)]

    def score_all() -> list[float | None]:
        plays = runner_calls.open_sessions(runner, CASES, range(EPISODES))
        scored = runner_calls.score(runner, plays, completions)
        runner_calls.end(runner, plays)
        return [one.score for one in scored]

    with closing(EnvRunner(environment, config, apart)) as runner:
        yield score_all


def one_by_one() -> list[float | None]:
    """As a reward function scores its completions where nobody thought of more: in a loop."""
    environment = Slow()
    return [environment.score_episode(text) for text in TEXTS]


def one_by_one_async() -> list[float | None]:
    """The same with `await` in the loop."""

    async def score_all() -> list[float | None]:
        environment = SlowAsync()
        return [await environment.score_episode(text) for text in TEXTS]

    return asyncio.run(score_all())


if __name__ == "__main__":
    sys.exit(main())
