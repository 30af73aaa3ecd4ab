"""What episodes gain that go on one by one: a vLLM server, 64 episodes of 6 turns, an environment that takes its time.

`python -m benchmarks.free_running [--pairs N]`, where vLLM is installed; exits 1 when the bound is not met. Both sides
play the same episodes with the same server, the tiny model and the same times of the environment, 0 to 0.5 s for each
step: in rounds, where all wait for the slowest one, and each by itself. Two kinds of environments: most steps are fast
and some are slow, as over a network (the bound is for this one), and all times are equally likely.

Rounds take the slowest time of each round, free running those of the slowest episode, and both the model's time for six
answers. So there is only so much to gain: `possible` is the ratio if the model took no time at all.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.measuring import Bounds, Row, options, show, spread
from benchmarks.overhead import SURROUNDINGS

EPISODES, TURNS, ANSWER_TOKENS = 64, 6, 8
LONGEST = 0.5
"""Seconds of a step."""
SECONDS = Bounds(ratio=1 / 1.5)

Times = Callable[[random.Random], list[float]]
"""The seconds of each step of one episode."""


def mostly_fast(drawn: random.Random) -> list[float]:
    """Half of the steps take less than a sixteenth of the longest."""
    return [LONGEST * drawn.random() ** 4 for _ in range(TURNS)]


def all_alike(drawn: random.Random) -> list[float]:
    """Any time is as likely as any other."""
    return [LONGEST * drawn.random() for _ in range(TURNS)]


class Slow:
    """Answers the same to everything, after its time."""

    def __init__(self, times: Times) -> None:
        self.seconds = [times(random.Random(number)) for number in range(EPISODES)]

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        """TURNS answers."""
        yield None
        for seconds in self.seconds[case_idx][1:]:
            time.sleep(seconds)
            yield "and then?"
        time.sleep(self.seconds[case_idx][0])
        return 1.0

    @property
    def possible(self) -> float:
        """Free running by rounds, for a model that takes no time."""
        return max(map(sum, self.seconds)) / sum(map(max, zip(*self.seconds, strict=True)))


def main() -> int:
    """Measure, show, judge."""
    pairs = options("Seconds of a rollout, each episode by itself against rounds.").parse_args().pairs
    os.environ.update(SURROUNDINGS)
    from aitrain.training.model import TINY_MODEL
    from aitrain.vllm.server_process import ServerConfig, VLLMServer

    environments = {kind.__name__.replace("_", " "): Slow(kind) for kind in (mostly_fast, all_alike)}
    with tempfile.TemporaryDirectory(prefix="aitrain-free-") as folder:
        plan = ServerConfig(str(TINY_MODEL), Path(folder) / "log", context=1024, dtype="float32", sequences=EPISODES)
        with VLLMServer.start(plan, lambda _: None) as server:
            rows = [measured(name, slow, server.url, pairs) for name, slow in environments.items()]
    rows = [Row(row.name, row.ours, row.theirs, SECONDS if number == 0 else None) for number, row in enumerate(rows)]
    print(
        f"{EPISODES} episodes of {TURNS} turns, {ANSWER_TOKENS} tokens an answer, {pairs} pairs; seconds of a rollout\n"
    )
    is_met = show(rows, "rounds")
    print("\npossible: " + ", ".join(f"{name} {slow.possible:.2f}" for name, slow in environments.items()))
    print("times faster: " + ", ".join(f"{row.name} {spread([1 / ratio for ratio in row.ratios])}" for row in rows))
    return 0 if is_met else 1


def measured(name: str, environment: Slow, url: str, pairs: int) -> Row:
    """Both sides, in turn; a first pair of rollouts is not counted."""
    from aitrain.environment.runner import start_runner
    from aitrain.options.train import TrainConfig

    with closing(start_runner(environment, TrainConfig(rl_env_workers=EPISODES))) as runner:
        freely, in_rounds = rollouts(runner, url)
        for side in (freely, in_rounds):
            seconds_of(side)
        done = [(seconds_of(freely), seconds_of(in_rounds)) for _ in range(pairs)]
    return Row(name, *zip(*done, strict=True))


def rollouts(runner: Any, url: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A rollout of all episodes in the two ways, with the same server."""
    from transformers import AutoTokenizer

    from aitrain.engines.batching import BatchingEngine, BatchRow
    from aitrain.engines.sampling import CompletionBatch
    from aitrain.engines.server import VLLMServerEngine
    from aitrain.engines.server_fleet import ServerFleet
    from aitrain.environment.contract import Case
    from aitrain.rollout.chat_format import ChatFormat, format_for_episodes
    from aitrain.rollout.clock import RolloutClock
    from aitrain.rollout.engine import Completion, Decoding
    from aitrain.rollout.episode import Rollout
    from aitrain.rollout.event_loop import EventLoop
    from aitrain.rollout.limits import EndOfTurn, Limits
    from aitrain.training.model import TINY_MODEL
    from aitrain.vllm.client import VLLMClient

    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    end = EndOfTurn([tokenizer.eos_token_id])
    no_sync: Any = None
    server = VLLMServerEngine(ServerFleet.of([VLLMClient(url)], no_sync), "policy-base", end, context=1024)

    class InRounds(BatchingEngine):
        """All episodes get their next completion at the same time."""

        weight_version = 0

        def sample(self, rows: list[BatchRow], max_tokens: int, decoding: Decoding) -> list[Completion]:
            batch = CompletionBatch([row.prompt_ids for row in rows], server.sampling, max_tokens)
            with closing(EventLoop()) as own:  # another thread's, as this one is running
                return own.run(server.generate_batch(batch))

    limits, loop = Limits(TURNS, ANSWER_TOKENS, None, 1024), EventLoop()
    chat = format_for_episodes(ChatFormat(tokenizer), ["user"])
    cases = [Case(n, [{"role": "user", "content": f"count from {n}"}], {"prompt": ""}) for n in range(EPISODES)]

    def side(engine: Any) -> Callable[[], Any]:
        rollout = Rollout(runner, engine, chat, limits, end)
        return lambda: loop.run(rollout.play(cases, range(EPISODES)))

    return side(server), side(InRounds(end, 1024, RolloutClock()))


def seconds_of(side: Callable[[], Any]) -> float:
    """Of a rollout in which every episode had all its turns."""
    start = time.perf_counter()
    episodes = side()
    seconds = time.perf_counter() - start
    if any(len(episode.trajectory.turns) != TURNS or episode.result.score != 1.0 for episode in episodes):
        raise RuntimeError("an episode was not played to its end: the times cannot be compared")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
