"""What aitrain adds to a step on a GPU: seconds per step, tokens per second and GPU memory against plain TRL.

`python -m benchmarks.gpu [--shapes NAME ...] [--weights lora full] [--steps N] [--pairs N] [--answer N]`; exits 1 when
a bound is not met, and 2 without a CUDA GPU. Random models in the shapes of Qwen2.5-0.5B and -1.5B, made on the spot;
generation by transformers; number formats as aitrain chooses them, which is bf16 where the GPU has it. With `--device
cpu --shapes tiny` it shows that it runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measuring import ROOT, Row, options, positive, show
from benchmarks.overhead import (
    MEMORY,
    SECONDS,
    SURROUNDINGS,
    Side,
    Training,
    aitrain,
    check_same_work,
    in_new_process,
    plain_trl,
    row,
    write_settings,
)
from benchmarks.shapes import QWEN_HALF_B, QWEN_ONE_AND_A_HALF_B, QWEN_THREE_B, TINY, Shape, make_model

SHAPES = {shape.name: shape for shape in (TINY, QWEN_HALF_B, QWEN_ONE_AND_A_HALF_B, QWEN_THREE_B)}
WEIGHTS: dict[str, dict[str, Any]] = {"lora": {"peft": True, "merge_adapter": False}, "full": {}}
PROMPTS, GENERATIONS = 8, 8

SETTINGS: dict[str, Any] = {
    "rl_prompts_per_step": PROMPTS,
    "rl_num_generations": GENERATIONS,
    "batch_size": 16,
}
ASK = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
NO_GPU = "No CUDA GPU is visible, and this benchmark needs one; `--device cpu --shapes tiny` only shows that it runs."


def main() -> int:
    """Measure, show, judge."""
    wanted = _options()
    os.environ.update(SURROUNDINGS | {"CUDA_VISIBLE_DEVICES": _device(wanted.device)})
    name = gpu_name() if wanted.device == "cuda" else ""
    if wanted.device == "cuda" and not name:
        print(NO_GPU, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="aitrain-gpu-") as folder:
        done = [each for shape in wanted.shapes for each in measure(Path(folder), SHAPES[shape], wanted)]
    tokens = tokens_per_step(wanted.answer)
    print(f"{name or 'CPU'}; {wanted.pairs} pairs of {wanted.steps} timed steps, {tokens} sampled tokens each\n")
    is_met = show([line for each in done for line in each.rows()], "plain TRL")
    print("\nthe same completions on both sides:", ", ".join(f"{each.name}: {each.same}" for each in done))
    return 0 if is_met else 1


def _options() -> argparse.Namespace:
    parser = options("Seconds per step, tokens per second and GPU memory of aitrain, against plain TRL.")
    parser.add_argument("--steps", type=positive, default=6, help="timed steps of each training (default: 6)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "1.5B"], help="(default: 0.5B 1.5B)")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="(default: lora full)")
    parser.add_argument("--answer", type=positive, default=128, help="tokens of each answer (default: 128)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(default: cuda)")
    return parser.parse_args()


def tokens_per_step(answer: int) -> int:
    """No answer of these models ends before its most tokens."""
    return PROMPTS * GENERATIONS * answer


def _device(wanted: str) -> str:
    """One GPU, the first that is visible: TRL alone refuses several without a launcher."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if wanted == "cuda" else ""


def gpu_name() -> str:
    """What torch sees, in a process of its own; nothing where it sees none."""
    done = subprocess.run([sys.executable, "-c", ASK], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def measure(folder: Path, shape: Shape, wanted: argparse.Namespace) -> list[Pairs]:
    """The shape with each of the kinds of weights."""
    model = folder / shape.name
    in_new_process(partial(make_model, shape), model)
    done = []
    for weights in wanted.weights:
        settings = SETTINGS | WEIGHTS[weights] | {"rl_max_new_tokens": wanted.answer}
        training = Training(folder / f"{shape.name}-{weights}", str(model), wanted.steps, settings)
        in_new_process(write_settings, training)
        sides = [(aitrain(training), plain_trl(training)) for _ in range(wanted.pairs)]
        if wanted.device == "cpu":
            check_same_work([side for pair in sides for side in pair])
        done.append(Pairs(f"{shape.name} {weights}", sides, wanted.device == "cuda", tokens_per_step(wanted.answer)))
    return done


@dataclass(frozen=True)
class Pairs:
    """What was measured of one training, both sides in turn."""

    name: str
    sides: list[tuple[Side, Side]]
    is_on_gpu: bool
    tokens: int
    """Sampled in a step."""

    def rows(self) -> list[Row]:
        """Bounds are for the GPU."""
        seconds, memory = (SECONDS, MEMORY) if self.is_on_gpu else (None, None)
        used = (lambda side: side.gpu_mib) if self.is_on_gpu else (lambda side: side.peak_mib)
        kind = "GPU" if self.is_on_gpu else "resident"
        return [
            row(f"{self.name}: seconds per step", self.sides, lambda side: side.seconds, seconds),
            row(f"{self.name}: tokens per second", self.sides, lambda side: self.tokens / side.seconds),
            row(f"{self.name}: peak {kind} memory, MiB", self.sides, used, memory),
        ]

    @property
    def same(self) -> str:
        """How many pairs said the same, to the last letter. Kernels of a GPU may add up in another order every time,
        and one other bit is enough; the work is the same then, too, as all answers have the same length."""
        count = sum(ours.completions == theirs.completions for ours, theirs in self.sides)
        return f"{count} of {len(self.sides)} pairs"


if __name__ == "__main__":
    sys.exit(main())
