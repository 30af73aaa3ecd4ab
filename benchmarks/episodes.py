"""What aitrain's own code takes for a turn of an episode.

512 episodes of 8 turns with an engine that answers at once and an environment that does next to nothing: what is left
is the chat format, the threads of the environment and the bookkeeping. In rounds, and with an engine that answers each
episode by itself; beside them the chat template and the tokenizer alone, for scale.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from typing import Any

from benchmarks.measuring import Asked, Figure

EPISODES, TURNS = 512, 8
SAID = "go on"


class Talk:
    """Says the same seven times."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return []

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        yield None
        for _ in range(TURNS - 1):
            yield SAID
        return 1.0


def measure(asked: Asked) -> Iterator[Figure]:
    """Each in turn, the first time uncounted."""
    count = 64 if asked.is_short else EPISODES
    sides = prepared(count)
    gc.collect()
    gc.freeze()  # as a run does before it trains
    for name, side in sides.items():
        taken = [seconds(side) / count / TURNS * 1e6 for _ in range(asked.pairs + 1)]
        yield Figure(f"{name}: microseconds a turn", taken[1:])


def seconds(side: Callable[[], object]) -> float:
    """How long it takes."""
    start = time.perf_counter()
    side()
    return time.perf_counter() - start


def prepared(count: int) -> dict[str, Callable[[], object]]:
    """The measurements by their names, each of `count` episodes."""
    from transformers import AutoTokenizer

    from aitrain.engines.batching import BatchingEngine
    from aitrain.engines.sampling import Sampling
    from aitrain.environment.contract import Case
    from aitrain.environment.runner import start_runner
    from aitrain.options.train import TrainConfig
    from aitrain.packages import TINY_FOLDER
    from aitrain.rollout.chat_format import ChatFormat, format_for_episodes
    from aitrain.rollout.end_of_turn import EndOfTurn
    from aitrain.rollout.engine import Completion, Engine, GenerationRequest
    from aitrain.rollout.episode import Rollout
    from aitrain.rollout.event_loop import event_loop

    tokenizer = AutoTokenizer.from_pretrained(TINY_FOLDER)
    end, loop = EndOfTurn([tokenizer.eos_token_id]), event_loop()
    ids = [*tokenizer("an answer", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    chat = format_for_episodes(ChatFormat(tokenizer), ["user"])
    cases = [Case(n, [{"role": "user", "content": f"say {n}:"}], {"prompt": ""}, n) for n in range(count)]

    class Rounds(BatchingEngine):
        """Answers all episodes at once."""

        def sample(self, rows: list[GenerationRequest], sampling: Sampling, max_tokens: int) -> list[Completion]:
            return [Completion(ids, [-0.1] * len(ids)) for _ in rows]

    class Server(Engine):
        """Answers each episode at once."""

        def __init__(self) -> None:
            self.end = end

        async def generate(self, request: GenerationRequest) -> Completion:
            return Completion(ids, [-0.1] * len(ids))

    def play(engine: Any) -> None:
        with closing(start_runner(Talk(), TrainConfig(rl_max_turns=TURNS, rl_max_new_tokens=32))) as runner:
            episodes = loop.run(Rollout(runner, engine, chat, None).play(cases, range(count), range(count)))
        if any(len(one.trajectory.turns) != TURNS or one.result.score != 1.0 for one in episodes):
            raise RuntimeError("an episode was not played to its end: the times mean nothing")

    def format_alone() -> None:
        for _ in range(count * TURNS):
            chat.read(ids, [], (), end.eos_ids)
            chat.following_ids([{"role": "user", "content": SAID}], ids, is_chat=True)

    return {
        "in rounds": lambda: play(Rounds(end)),
        "one by one": lambda: play(Server()),
        "chat format alone": format_alone,
    }
