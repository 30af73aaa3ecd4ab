"""What it takes to learn a second turn: all turns trained, against a second turn that the environment generates.

`python -m benchmarks.multi_turn_learning [--pairs N] [--steps N]`; exits 1 when a bound is not met. Each turn wants
another character. The two sides differ in nothing but who asks the model for the second one: aitrain's trainer, or
`score_episode` with `model.generate`, which is how AITraining's environments go on after the first answer.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from aitrain import Score
from aitrain.runs.run_folder import read_lines
from benchmarks.measuring import options, positive, spread
from benchmarks.overhead import SURROUNDINGS
from benchmarks.quiet_training import train

WANTED = ("4", "5")
"""The character of each turn. The tiny model says the first one in a tenth of its answers, the second in fewer."""

TURNS = ("first", "second")

SAMPLING = {"max_new_tokens": 1, "temperature": 1.0, "top_k": 50}
SETTINGS: dict[str, Any] = {
    **{f"rl_{name}": value for name, value in SAMPLING.items()},
    "lr": 1e-3,
    "rl_prompts_per_step": 8,
    "rl_num_generations": 8,
    "batch_size": 64,
}
MORE = " more: "
HELD_OUT = 128


class TwoCharacters:
    """The environment, less its second turn: half a point for each turn in which the right character is said."""

    def build_dataset(self) -> list[dict[str, Any]]:
        """Prompts that differ only in a number."""
        return [{"prompt": f"{number}: "} for number in range(200)]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        """Other numbers."""
        return [{"prompt": f"{number}: "} for number in range(200, 200 + HELD_OUT)]

    def judge(self, first: str, second: str) -> Score:
        """The score, and for each turn whether it was right."""
        right = float(first == WANTED[0]), float(second == WANTED[1])
        return Score(sum(right) / 2, dict(zip(TURNS, right, strict=True)))


class BothTrained(TwoCharacters):
    """aitrain's way: the trainer asks for both turns, and trains both."""

    def episode(self) -> Generator[str | None, str, Score]:
        """One episode."""
        first = yield None
        second = yield MORE
        return self.judge(first, second)


class SecondInScore(TwoCharacters):
    """AITraining's way: the trainer asks for the first turn, `score_episode` for the second."""

    def score_episode(self, model: Any, tokenizer: Any, prompt: str, completion: str) -> Score:
        """Go on from the first answer, with the same tokens and sampled as the trainer does."""
        tokens = tokenizer(prompt + completion + MORE, return_tensors="pt")
        said = model.generate(**tokens, **SAMPLING, do_sample=True)
        second = tokenizer.decode(said[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
        return self.judge(completion, second)


@dataclass(frozen=True)
class Goal:
    """What the median over the seeds must be."""

    low: float = 0.0
    high: float = 1.0

    def __str__(self) -> str:
        return f">= {self.low:g}" if self.low else f"<= {self.high:g}"

    def is_met(self, values: Sequence[float]) -> bool:
        """Whether it is."""
        return self.low <= median(values) <= self.high


LEARNED, UNLEARNED = Goal(low=0.9), Goal(high=0.1)
GOALS = {"first": (LEARNED, LEARNED), "second": (LEARNED, UNLEARNED)}
"""For each turn, of aitrain and of its peer, which must learn the first turn too."""


@dataclass(frozen=True)
class Learned:
    """How often each turn was right on the held-out cases, before and after."""

    before: dict[str, float]
    after: dict[str, float]


def main() -> int:
    """Train both sides with each seed, show, judge."""
    wanted = _options()
    os.environ.update(SURROUNDINGS)
    sides = (BothTrained(), SecondInScore())
    with tempfile.TemporaryDirectory(prefix="aitrain-turns-") as folder:
        done = [[learned(side, folder, wanted.steps, seed) for side in sides] for seed in range(wanted.pairs)]
    print(
        f"share of {HELD_OUT} held-out episodes in which a turn was right; {wanted.steps} steps, {wanted.pairs} seeds\n"
    )
    ours, theirs = zip(*done, strict=True)
    return 0 if show(ours, theirs) else 1


def _options() -> argparse.Namespace:
    parser = options("How well each of two turns is learned, by who asks the model for the second one.")
    parser.add_argument("--steps", type=positive, default=140, help="steps of each training (default: 140)")
    return parser.parse_args()


def learned(environment: TwoCharacters, folder: str, steps: int, seed: int) -> Learned:
    """A training, and what its rollout records say of the held-out cases."""
    result = train(environment, folder, max_steps=steps, seed=seed, **SETTINGS)
    records = list(read_lines(result.folder / "rollouts" / "rank0.jsonl"))
    return Learned(shares(records, "before_sampled"), shares(records, "after_sampled"))


def shares(records: list[dict[str, Any]], when: str) -> dict[str, float]:
    """For each turn, how often it was right at that time."""
    metrics = [record["metrics"] for record in records if record.get("eval_phase") == when]
    if len(metrics) != HELD_OUT:
        raise RuntimeError(f"{len(metrics)} held-out episodes were scored {when}, not {HELD_OUT}")
    return {turn: fmean(metric[turn] for metric in metrics) for turn in TURNS}


# -- showing


def show(ours: Sequence[Learned], theirs: Sequence[Learned]) -> bool:
    """Print the table; returns whether all goals are reached."""
    lines, is_met = [["median (min..max)", "aitrain", "in score_episode", "bounds"]], True
    for turn, goals in GOALS.items():
        before = [[one.before[turn] for one in side] for side in (ours, theirs)]
        after = [[one.after[turn] for one in side] for side in (ours, theirs)]
        reached = all(goal.is_met(values) for goal, values in zip(goals, after, strict=True))
        is_met &= reached
        verdict = f"{' and '.join(map(str, goals))}: {'ok' if reached else 'NOT MET'}"
        lines += [_line(f"{turn} turn, before", before), _line(f"{turn} turn, after", after, verdict)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return is_met


def _line(name: str, sides: list[list[float]], verdict: str = "") -> list[str]:
    return [name, *map(spread, sides), verdict]


if __name__ == "__main__":
    sys.exit(main())
