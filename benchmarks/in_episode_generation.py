"""What an environment gains that plays its turns itself: `model.generate` inside of `score_episode`, unchanged.

One side scores the episodes one after another with the model itself, which is how AITraining does it. The other side is
aitrain's: a thread for each episode, and a batcher that answers together what they ask. Greedy decoding: both must come
to the same scores. As a run does it, the environments hold what those of slow_environment.py do.

The bounds are for the tiny model, whose single steps are too short to keep a CPU core busy, as those of larger ones are
for a GPU.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any

from benchmarks.measuring import Asked, Figure, ratio
from benchmarks.slow_environment import HELD, Nothing, holding

EPISODES = [(f"answer {number % 7}", number) for number in range(64)]
"""The first answer, and the number of the case."""
TURNS, NEW_TOKENS = 4, 16
MOST, MOST_IN_RUN = 1 / 8, 1 / 5

Episodes = list[tuple[str, int]]
Side = Callable[[Any, Any, Any, Episodes], AbstractContextManager[Callable[[], list[Any]]]]
"""Gives a function that scores episodes, for an environment, a model and a tokenizer."""


class Talk(Nothing):
    """An environment as AITraining has them: the turns after the first answer are played in `score_episode`.

    No token ends a turn (see `compare`): all are equally long, so that the work is the same whatever the model says."""

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        """A number from 0 to 1 that any other answer would change."""
        self.use(completion)
        text = f"{case_idx}: {completion}"
        for _ in range(TURNS):
            inputs = tokenizer(text + "\n", return_tensors="pt").to(model.device)
            output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
            text += "\n" + tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 16**8


def measure(asked: Asked) -> Iterator[Figure]:
    """The batcher alone; then each environment as a run calls it."""
    yield compare("seconds", batcher_alone, Talk(), asked, MOST)
    for name, held in list(HELD.items())[: 2 if asked.is_short else None]:
        yield compare(f"as in a run, {name}: seconds", as_in_a_run, holding(Talk, held), asked, MOST_IN_RUN)


def compare(name: str, ours: Side, environment: Any, asked: Asked, most: float) -> Figure:
    """Measure both sides in turn; ours runs once before, uncounted, as the first run allocates and is watched."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from aitrain.packages import TINY_FOLDER

    disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(TINY_FOLDER)
    seconds, episodes = [], EPISODES[: 8 if asked.is_short else None]
    with ours(environment, model, tokenizer, episodes) as score_all:
        score_all()
        for _ in range(asked.pairs):
            start = time.perf_counter()
            scores = score_all()
            between = time.perf_counter()
            expected = [environment.score_episode(model, tokenizer, *each) for each in episodes]
            if scores != expected:
                raise RuntimeError("the two sides did not come to the same scores: their times cannot be compared")
            seconds.append((between - start, time.perf_counter() - between))
    return ratio(name, *zip(*seconds, strict=True), most)


@contextmanager
def batcher_alone(
    environment: Any, model: Any, tokenizer: Any, episodes: Episodes
) -> Iterator[Callable[[], list[Any]]]:
    """A thread for each episode, and nothing else."""
    from aitrain.engines.proxy_batcher import ProxyBatcher
    from aitrain.execution.deadline_pool import DeadlinePool
    from tests.training.proxy_calls import run_with

    batcher = ProxyBatcher(model, tokenizer)
    jobs = [partial(environment.score_episode, batcher.policy, tokenizer, *each) for each in episodes]
    pool = DeadlinePool(len(episodes), timeout=600)
    yield lambda: [outcome.value for outcome in run_with(pool, batcher, jobs)]


@contextmanager
def as_in_a_run(environment: Any, model: Any, tokenizer: Any, episodes: Episodes) -> Iterator[Callable[[], list[Any]]]:
    """With what decides which calls may run at the same time."""
    from aitrain.engines.proxy_batcher import offer_model
    from aitrain.environment.contract import Case, Transcript
    from aitrain.environment.runner import EnvSession, start_runner
    from aitrain.options.train import TrainConfig

    row = {"prompt": "question"}
    transcripts = [Transcript(Case(number, "question", row), answer) for answer, number in episodes]

    async def score_all() -> list[Any]:
        sessions = [EnvSession(one.case, 0) for one in transcripts]
        await runner.open(sessions)
        async with scoring():
            await runner.score(dict(zip(sessions, transcripts, strict=True)))
        await runner.end(sessions)
        return [one.result.score for one in sessions]

    with closing(start_runner(environment, TrainConfig(rl_env_timeout=600))) as runner:
        scoring = offer_model(runner, model, tokenizer)
        yield lambda: asyncio.run(score_all())
