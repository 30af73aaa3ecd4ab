"""What shared prompts save: seconds of optimization and generation, against rows apart, as TRL computes them.

One turn, groups of 8, 8 layers of SmolLM2-135M with random weights and few words. Both sides must get the same rewards.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import Asked, Figure, ratio
from benchmarks.models import make_model
from benchmarks.padding import trained

LENGTHS = {
    (512, 64): (0.3, 0.55),
    (16, 256): (1.02, math.inf),
    (200, 512): (1.02, math.inf),
    (512, 512): (1.02, math.inf),
}
"""Tokens of prompt and answer, and the most seconds of both parts, by those of rows apart."""
SIDES: tuple[dict[str, Any], ...] = {}, {"share_prefixes": False, "rl_trim_padding": False}


@dataclass(frozen=True)
class Prompts:
    """Prompts of so many letters, each a token; which answer is worth more is arbitrary."""

    tokens: int

    def build_dataset(self) -> list[dict[str, Any]]:
        """One prompt for each of two steps, and more."""
        return [{"prompt": f"{number}{'p' * (self.tokens - 1)}"} for number in range(4)]

    def score_episode(self, completion: str) -> float:
        """By the share of letters."""
        return sum(map(str.isalpha, completion)) / (1 + len(completion))


def measure(asked: Asked) -> Iterator[Figure]:
    """Measure both sides in turn."""
    with tempfile.TemporaryDirectory(prefix="aitrain-shared-") as folder:
        make_model("8 layers of SmolLM2-135M", Path(folder) / "model")
        for (prompt, answer), bounds in list(LENGTHS.items())[: 1 if asked.is_short else None]:
            length = {"rl_max_new_tokens": answer, "rl_prompts_per_step": 1, "rl_num_generations": 8, "batch_size": 4}
            done = [
                [trained(Path(folder), Prompts(prompt), rl_top_k=50, seed=pair, **length, **more)[-1] for more in SIDES]
                for pair in range(asked.pairs)
            ]
            ours, theirs = zip(*done, strict=True)
            for part, most in zip(("optimize", "generate"), bounds, strict=True):
                sides = ([line[f"time/{part}"] for line in side] for side in (ours, theirs))
                yield ratio(f"prompt {prompt}, answers {answer}: {part}", *sides, most)
            largest = max(abs(one["reward"] - other["reward"]) for one, other in done)
            yield Figure(f"prompt {prompt}, answers {answer}: difference of rewards", [largest], 0.02)
