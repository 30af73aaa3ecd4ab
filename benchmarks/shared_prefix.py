"""What shared prompts save: CPU seconds of a step and memory, against rows apart, as TRL computes them.

One turn, groups of 8, 8 layers of SmolLM2-135M with random weights and few words; and the recipe smollm2-calculator,
whose episodes have up to three turns. Both sides must get the same rewards.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import yaml

from benchmarks.measuring import ROOT, Asked, Figure, in_new_process, ratio
from benchmarks.models import make_model
from benchmarks.padding import trained

LENGTHS: dict[tuple[int, int], dict[str, float]] = {
    (512, 64): {"time/optimize": 0.3, "time/generate": 0.55},
    (16, 256): {"time/optimize": 1.02},
    (200, 512): {"time/optimize": 1.02},
    (512, 512): {"time/optimize": 1.02},
}
"""Tokens of prompt and answer, and the most seconds of parts of a step, by those of rows apart."""
STEP, MEMORY = 0.45, 1.05
"""The most seconds of the recipe's step, and the most memory of all, likewise."""
RECIPE = ROOT / "recipes" / "smollm2-calculator"
LENGTH: dict[str, Any] = {"rl_prompts_per_step": 1, "rl_num_generations": 8, "batch_size": 4, "rl_top_k": 50}
SIDES: tuple[dict[str, Any], ...] = {}, {"share_prefixes": False, "rl_trim_padding": False}


@dataclass(frozen=True)
class Prompts:
    """Prompts of `tokens` letters, each a token; which answer is worth more is arbitrary."""

    tokens: int

    def build_dataset(self) -> list[dict[str, Any]]:
        """One prompt for each of two steps, and more."""
        return [{"prompt": f"{number}{'p' * (self.tokens - 1)}"} for number in range(4)]

    def score_episode(self, completion: str) -> float:
        """By the share of letters."""
        return sum(map(str.isalpha, completion)) / (1 + len(completion))


def measure(asked: Asked) -> Iterator[Figure]:
    """Measure both sides in turn."""
    recipe = yaml.safe_load((RECIPE / "config.yaml").read_text(encoding="utf-8"))
    recipe |= {name: str(RECIPE / recipe[name]) for name in ("rl_env", "chat_template")} | {"mixed_precision": "no"}
    cases: dict[str, tuple[object, dict[str, float], dict[str, Any]]] = {
        f"prompt {prompt}, answers {answer}": (Prompts(prompt), bounds, LENGTH | {"rl_max_new_tokens": answer})
        for (prompt, answer), bounds in LENGTHS.items()
    }
    cases["smollm2-calculator"] = None, {"time/step": STEP}, recipe
    with tempfile.TemporaryDirectory(prefix="aitrain-shared-") as folder:
        make_model("very small" if asked.is_short else "8 layers of SmolLM2-135M", Path(folder) / "model")
        for name, (environment, bounds, options) in list(cases.items())[: 1 if asked.is_short else None]:
            done = [
                [in_new_process(of_side, Path(folder), environment, options | side | {"seed": pair}) for side in SIDES]
                for pair in range(asked.pairs)
            ]
            ours, theirs = zip(*done, strict=True)
            for part, most in (bounds | {"memory": MEMORY}).items():
                yield ratio(f"{name}: {part}", *([line[part] for line in side] for side in (ours, theirs)), most)
            largest = max(abs(one["reward"] - other["reward"]) for one, other in done)
            yield Figure(f"{name}: difference of rewards", [largest], 0.02)


def of_side(folder: Path, environment: object, options: dict[str, Any]) -> dict[str, float]:
    """The metrics of the second step, with CPU seconds and the peak of memory."""
    from aitrain.rollout import engine
    from aitrain.training import step_events, trainer

    cpu = SimpleNamespace(monotonic=time.process_time, time=time.time)
    with patch.object(engine, "time", cpu), patch.object(step_events, "time", cpu), patch.object(trainer, "time", cpu):
        line = trained(folder, environment, **options)[-1]
    return line | {"memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
