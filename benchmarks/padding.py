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
            {name: of_side(Path(folder), pair, 4 if asked.is_short else 6, more) for name, more in SIDES.items()}
            for pair in range(asked.pairs)
        ]
    if any(len({str([line["reward"] for line in side.lines]) for side in sides.values()}) != 1 for sides in rounds):
        raise RuntimeError("the sides were rewarded differently: they cannot be compared")
    theirs, *ours = SIDES
    real = {name: [sides[name].forwarded for sides in rounds] for name in SIDES}
    seconds = {name: [sides[name].lines[-1]["time/optimize"] for sides in rounds] for name in SIDES}
    for name in ours:
        yield Figure(f"{name}: forwarded by real tokens", real[name], FORWARDED)
        yield ratio(f"{name}: forwarded tokens", real[name], real[theirs], TOKENS)
        most = math.inf if asked.is_short else SECONDS
        yield ratio(f"{name}: seconds a step", seconds[name], seconds[theirs], most)


def trained(folder: Path, environment: object, **options: Any) -> list[dict[str, Any]]:
    """The metrics of each step of a training of two steps with the model of a folder."""
    import aitrain

    given = {
        "model": str(folder / "model"), "output_dir": str(folder / "runs"), "max_steps": STEPS, "rl_kl_coef": 0.0,
        "eval_cases": 0, "save_strategy": "no", "logging_steps": 1, "disable_gradient_checkpointing": True,
    }  # fmt: skip
    config = aitrain.TrainConfig(**(options | given | {"model": options.get("model", given["model"])}))
    return [line for line in aitrain.train(config, environment=environment).history if "reward" in line]


@dataclass
class Side:
    """The metrics of each step, and the tokens in training passes, padding included, by real ones."""

    lines: list[dict[str, Any]]
    forwarded: float


def of_side(folder: Path, seed: int, mean: float, more: dict[str, Any]) -> Side:
    """A side with the lengths of this seed."""
    with prescribed(seed, mean), counted() as passes:
        lines = trained(
            folder, Lengths(), rl_prompts_per_step=PROMPTS, rl_num_generations=GENERATIONS, rl_max_new_tokens=LONGEST,
            seed=seed, share_prefixes=False, **more,
        )  # fmt: skip
    return Side(lines, sum(passes) / lines[-1]["num_tokens"])


@contextmanager
def counted() -> Iterator[list[int]]:
    """The tokens of each forward pass with gradients, as its embedding gets them."""
    import torch

    counts: list[int] = []

    def count(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, torch.nn.Embedding) and torch.is_grad_enabled():
            counts.append(given[0].numel())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield counts
    finally:
        hook.remove()


@contextmanager
def prescribed(seed: int, mean: float) -> Iterator[None]:
    """Completions of prescribed lengths, of whose logarithms this is the mean, in the place of generation."""
    from aitrain.engines.hf import HFEngine
    from aitrain.rollout.engine import Completion, GenerationRequest

    draw = random.Random(seed)

    def sample(self: HFEngine, rows: list[GenerationRequest], *_: object) -> list[Completion]:
        end = self.tokenizer.eos_token_id
        lengths = [min(LONGEST, max(8, round(draw.lognormvariate(mean, 1)))) for _ in rows]
        return [Completion([*draw.choices(range(60, 90), k=length - 1), end]) for length in lengths]

    with patch.object(HFEngine, "sample", sample):
        yield
