"""What an environment gains that plays its turns itself: `model.generate` inside of `score_episode`, unchanged.

`python -m benchmarks.in_episode_generation [--pairs N]`; exits 1 when a bound is not met. One side scores the episodes
one after another with the model itself, which is how AITraining does it. The other side is aitrain's: a thread for each
episode, and a batcher that answers together what they ask. Greedy decoding: both must come to the same scores.

The bound is for the tiny model, whose single steps are too short to keep a CPU core busy, as those of larger ones are
for a GPU. One core has its hands full with a single row of 10 million weights: that ratio is shown beside it.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measuring import Bounds, Row, options, show
from benchmarks.overhead import SURROUNDINGS, in_new_process, make_random_model

EPISODES, TURNS, NEW_TOKENS = 64, 4, 16
SECONDS = Bounds(ratio=1 / 8)


class Talk:
    """An environment as AITraining has them: the turns after the first answer are played in `score_episode`.

    All turns are equally long, so that the work is the same whatever the model says."""

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        """A number from 0 to 1 that any other answer would change."""
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        text = f"{case_idx}: {completion}"
        for _ in range(TURNS):
            inputs = tokenizer(text + "\n", return_tensors="pt").to(model.device)
            output = model.generate(**inputs, **length, do_sample=False)
            text += "\n" + tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 16**8


Side = Callable[[], list[float]]
"""Scores all episodes."""


def main() -> int:
    """Measure, show, judge."""
    wanted = options("Seconds for episodes that generate in score_episode, against one after another.").parse_args()
    os.environ.update(SURROUNDINGS)
    with tempfile.TemporaryDirectory(prefix="aitrain-in-episode-") as folder:
        in_new_process(make_random_model, Path(folder))
        rows = [compare("tiny model", "tiny", wanted.pairs, SECONDS)]
        few = -(-wanted.pairs // 3)
        rows.append(compare("10 million weights", folder, few))
    print(f"{EPISODES} episodes, {TURNS} turns each, {NEW_TOKENS} new tokens a turn; torch has 1 thread on both sides")
    print(f"{wanted.pairs} pairs with the tiny model, {few} with the larger one\n")
    return 0 if show(rows, "one by one") else 1


def compare(name: str, model: str, pairs: int, bounds: Bounds | None = None) -> Row:
    """Both sides in turn, so many times; ours goes once before, uncounted, because what runs first allocates."""
    ours, theirs = sides(model)
    timed(ours)
    seconds = []
    for _ in range(pairs):
        mine, scores = timed(ours)
        other, expected = timed(theirs)
        if scores != expected:
            raise RuntimeError("the two sides did not come to the same scores: their times cannot be compared")
        seconds.append((mine, other))
    return Row(f"{name}: seconds", [mine for mine, _ in seconds], [other for _, other in seconds], bounds)


def timed(side: Side) -> tuple[float, list[float]]:
    """How long it takes, and the scores."""
    start = time.perf_counter()
    scores = side()
    return time.perf_counter() - start, scores


def sides(name: str) -> tuple[Side, Side]:
    """aitrain's and the plain one, on the same model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from aitrain.engines.proxy_batcher import ProxyBatcher
    from aitrain.execution.deadline_pool import DeadlinePool
    from aitrain.training.model import model_path
    from tests.training.proxy_calls import run_with

    disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path(name))
    tokenizer = AutoTokenizer.from_pretrained(model_path(name))
    environment = Talk()

    def episode(policy: Any, number: int) -> float:
        return environment.score_episode(policy, tokenizer, f"answer {number % 7}", number)

    def ours() -> list[float]:
        pool, batcher = DeadlinePool(EPISODES, timeout=600), ProxyBatcher(model, tokenizer.pad_token_id)
        jobs = [lambda number=number: episode(batcher.policy, number) for number in range(EPISODES)]
        outcomes = run_with(pool, batcher, jobs)
        pool.close()
        return [outcome.value for outcome in outcomes]

    return ours, lambda: [episode(model, number) for number in range(EPISODES)]


if __name__ == "__main__":
    sys.exit(main())
