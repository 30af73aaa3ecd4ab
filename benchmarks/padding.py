"""What trimmed padding saves: tokens that go through the model, and seconds of the optimization, against TRL's padding.

`python -m benchmarks.padding [--pairs N]`; exits 1 when a bound is not met. Completions are prescribed, with lengths as
in RL: lognormal, 8 to 2,048 tokens. Both sides must play and train the same rows.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.measuring import Bounds, Row, options, show
from benchmarks.overhead import SURROUNDINGS

TOKENS, SECONDS = Bounds(ratio=0.5, ours=1.15), Bounds(ratio=0.6)
PROMPTS, GENERATIONS, LONGEST, STEPS = 4, 8, 2048, 2
SIDES: dict[str, dict[str, Any]] = {
    "TRL's padding": {"batch_size": 4},
    "rl_trim_padding": {"batch_size": 4, "rl_trim_padding": True},
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


def main() -> int:
    """Measure, show, judge."""
    pairs = options("Tokens and seconds of an optimization with trimmed padding, against TRL's.").parse_args().pairs
    os.environ.update(SURROUNDINGS)
    with tempfile.TemporaryDirectory(prefix="aitrain-padding-") as folder:
        model = make_model(Path(folder) / "model")
        rounds = [
            {name: trained(model, Path(folder), pair, more) for name, more in SIDES.items()} for pair in range(pairs)
        ]
    for sides in rounds:
        if len({str(side.rewards) for side in sides.values()}) != 1:
            raise RuntimeError("the sides were rewarded differently: they cannot be compared")
    (theirs, *ours), rows = SIDES, list[Row]()
    for name in ours:
        both = [(sides[name], sides[theirs]) for sides in rounds]
        rows.append(Row(f"{name}: forwarded / real", [a.ratio for a, _ in both], [b.ratio for _, b in both], TOKENS))
        rows.append(Row(f"{name}: seconds a step", [a.seconds for a, _ in both], [b.seconds for _, b in both], SECONDS))
    print(f"{PROMPTS * GENERATIONS} completions a step, {pairs} pairs\n")
    return 0 if show(rows, theirs) else 1


def make_model(folder: Path) -> Path:
    """A small Llama of random weights with a long context, and the tiny model's tokenizer."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from tests.tiny_model import build_tokenizer

    disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=1, head_dim=32, max_position_embeddings=4096, tie_word_embeddings=True, **ends,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained(model: Path, folder: Path, pair: int, more: dict[str, Any]) -> Side:
    """Train; the first step is not timed."""
    import aitrain

    config = aitrain.TrainConfig(
        model=str(model), output_dir=str(folder / "runs"), rl_prompts_per_step=PROMPTS, rl_num_generations=GENERATIONS,
        rl_max_new_tokens=LONGEST, max_steps=STEPS, rl_kl_coef=0.0, eval_cases=0, save_strategy="no", seed=pair,
        logging_steps=1, disable_gradient_checkpointing=True, **more,
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


if __name__ == "__main__":
    sys.exit(main())
