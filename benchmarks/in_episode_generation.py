"""What an environment gains that plays its turns itself: `model.generate` inside of `score_episode`, unchanged.

One side scores the episodes one after another with the model itself, which is how AITraining does it. The other side is
aitrain's: a thread for each episode, and a batcher that answers together what they ask. Greedy decoding: both must come
to the same scores. The environments hold what those of slow_environment.py do.

The bound is for the tiny model, whose single steps are too short to keep a CPU core busy, as those of larger ones are
for a GPU. One core has its hands full with a single row of 10 million weights: that ratio is shown beside it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.measuring import Asked, Figure, ratio
from benchmarks.models import make_model
from benchmarks.slow_environment import HELD, Nothing, holding

EPISODES, TURNS, NEW_TOKENS = 64, 4, 16
MOST = 1 / 8


class Talk(Nothing):
    """An environment as AITraining has them: the turns after the first answer are played in `score_episode`.

    All turns are equally long, so that the work is the same whatever the model says."""

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        """A number from 0 to 1 that any other answer would change."""
        self.use(completion)
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        text = f"{case_idx}: {completion}"
        for _ in range(TURNS):
            inputs = tokenizer(text + "\n", return_tensors="pt").to(model.device)
            output = model.generate(**inputs, **length, do_sample=False)
            text += "\n" + tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 16**8


def measure(asked: Asked) -> Iterator[Figure]:
    """Each environment with the tiny model, and the larger model fewer times."""
    for name, held in list(HELD.items())[: 2 if asked.is_short else None]:
        yield compare(f"tiny model, {name}: seconds", "tiny", held, asked.pairs, MOST)
    with tempfile.TemporaryDirectory(prefix="aitrain-in-episode-") as folder:
        if not asked.is_short:
            make_model("10 million weights", Path(folder))
            yield compare("10 million weights: seconds", folder, Nothing, -(-asked.pairs // 3))


def compare(name: str, model_name: str, held: type, pairs: int, most: float = math.inf) -> Figure:
    """Both sides in turn, so many times; ours goes once before, uncounted: what runs first allocates and is watched."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from aitrain.engines.proxy_batcher import offer_model
    from aitrain.environment.contract import Case, Transcript
    from aitrain.environment.runner import start_runner
    from aitrain.options.train import TrainConfig
    from aitrain.training.model import model_path

    disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path(model_name), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path(model_name))
    environment = holding(Talk, held)
    cases = [Case(number, "question", {"prompt": "question"}) for number in range(EPISODES)]
    answers = [f"answer {number % 7}" for number in range(EPISODES)]

    async def score_all() -> list[float | None]:
        sessions = await runner.open(cases, range(EPISODES))
        async with scoring():
            scored = await runner.score(sessions, list(map(Transcript, cases, answers)))
        await runner.end(sessions)
        return [one.score for one in scored]

    seconds = []
    with closing(start_runner(environment, TrainConfig(rl_env_timeout=600))) as runner:
        scoring = offer_model(runner, model, tokenizer)
        asyncio.run(score_all())
        for _ in range(pairs):
            start = time.perf_counter()
            scores = asyncio.run(score_all())
            between = time.perf_counter()
            expected = [
                environment.score_episode(model, tokenizer, *each)
                for each in zip(answers, range(EPISODES), strict=True)
            ]
            if scores != expected:
                raise RuntimeError("the two sides did not come to the same scores: their times cannot be compared")
            seconds.append((between - start, time.perf_counter() - between))
    return ratio(name, *zip(*seconds, strict=True), most)
