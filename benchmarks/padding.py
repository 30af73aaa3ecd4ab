"""What trimmed padding saves: tokens that go through the model, and seconds of the optimization, against TRL's padding.

Completions are prescribed, with lengths as in RL: lognormal, 8 to 2,048 tokens. All sides must get the same rewards.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.measuring import Asked, Figure, ratio
from benchmarks.models import make_model

TOKENS, FORWARDED, SECONDS = 0.5, 1.15, 0.6
"""The most tokens and seconds by those of TRL's padding, and the most forwarded tokens by real ones."""
PROMPTS, GENERATIONS, LONGEST, STEPS = 4, 8, 2048, 2
SIDES: dict[str, dict[str, Any]] = {
    "TRL's padding": {"batch_size": 4, "rl_trim_padding": False},
    "rl_trim_padding": {"batch_size": 4},
    "tokens_per_pass": {"tokens_per_pass": 4 * LONGEST},
}


@dataclass
class Forwarded:
    """Tokens of forward passes with gradients."""

    padded: int = 0
    real: int = 0


@dataclass(frozen=True)
class Side:
    """What one training took."""

    ratio: float
    """Forwarded tokens by real ones."""
    seconds: float
    """Of the optimization in a step."""
    rewards: list[float]


class Lengths:
    """Prompts of 20 to 120 letters; a longer completion is worth more."""

    def build_dataset(self) -> list[dict[str, Any]]:
        """Prompts of several lengths."""
        return [{"prompt": "p" * (20 + 7 * number % 100)} for number in range(PROMPTS * STEPS)]

    def score_episode(self, completion: str) -> float:
        """By the number of letters."""
        return min(1.0, len(completion) / LONGEST)


def measure(asked: Asked) -> Iterator[Figure]:
    """Measure all sides in turn, with other lengths in each pair."""
    with tempfile.TemporaryDirectory(prefix="aitrain-padding-") as folder:
        make_model("very small", Path(folder) / "model")
        rounds = [
            {name: trained(Path(folder), pair, more) for name, more in SIDES.items()} for pair in range(asked.pairs)
        ]
    if any(len({str(side.rewards) for side in sides.values()}) != 1 for sides in rounds):
        raise RuntimeError("the sides were rewarded differently: they cannot be compared")
    theirs, *ours = SIDES
    for name in ours:
        real = [sides[name].ratio for sides in rounds]
        yield Figure(f"{name}: forwarded by real tokens", real, FORWARDED)
        yield ratio(f"{name}: forwarded tokens", real, [sides[theirs].ratio for sides in rounds], TOKENS)
        seconds = ([sides[side].seconds for sides in rounds] for side in (name, theirs))
        yield ratio(f"{name}: seconds a step", *seconds, math.inf if asked.is_short else SECONDS)


def trained(folder: Path, pair: int, more: dict[str, Any]) -> Side:
    """Train; the first step is not timed."""
    import aitrain

    config = aitrain.TrainConfig(
        model=str(folder / "model"), output_dir=str(folder / "runs"), rl_prompts_per_step=PROMPTS,
        rl_num_generations=GENERATIONS, rl_max_new_tokens=LONGEST, max_steps=STEPS, rl_kl_coef=0.0, eval_cases=0,
        save_strategy="no", seed=pair, logging_steps=1, disable_gradient_checkpointing=True, **more,
    )  # fmt: skip
    with prescribed(pair), counted() as forwarded:
        lines = [line for line in aitrain.train(config, environment=Lengths()).history if "reward" in line]
    seconds = [line["time/optimize"] for line in lines[1:]]
    return Side(forwarded.padded / forwarded.real, sum(seconds) / len(seconds), [line["reward"] for line in lines])


@contextmanager
def prescribed(seed: int) -> Iterator[None]:
    """Completions of prescribed lengths in the place of generation."""
    from aitrain.engines.batching import BatchRow
    from aitrain.engines.hf import HFEngine
    from aitrain.rollout.engine import Completion

    draw = random.Random(seed)

    def sample(self: HFEngine, rows: list[BatchRow], *_: object) -> list[Completion]:
        end = self.policy.tokenizer.eos_token_id
        lengths = [min(LONGEST, max(8, round(draw.lognormvariate(6, 1)))) for _ in rows]
        return [Completion([*draw.choices(range(60, 90), k=length - 1), end]) for length in lengths]

    with patch.object(HFEngine, "sample", sample):
        yield


@contextmanager
def counted() -> Iterator[Forwarded]:
    """Count the tokens of forward passes with gradients."""
    import torch
    from trl import GRPOTrainer

    count, compute = Forwarded(), GRPOTrainer._get_per_token_logps_and_entropies

    def counting(self: Any, model: Any, ids: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        if torch.is_grad_enabled():
            count.padded += ids.numel()
            count.real += int(mask.sum())
        return compute(self, model, ids, mask, *rest, **more)

    with patch.object(GRPOTrainer, "_get_per_token_logps_and_entropies", counting):
        yield count
