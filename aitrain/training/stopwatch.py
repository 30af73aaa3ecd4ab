"""Measures the training, and the parts of a step: generation, environment and optimization."""

from __future__ import annotations

import time

from aitrain.rollout.clock import RolloutClock

PARTS = ("step", "optimize", "generate", "environment")


class Stopwatch:
    """Seconds per step in which episodes waited for the policy and for their environments, on this process.

    With free-running episodes both clocks may run at the same time, so that the parts can add up to more than the step.
    `optimize` is the time of a step outside its rollout.
    """

    def __init__(self, clock: RolloutClock) -> None:
        self.steps = 0
        self.clock = clock
        self.total = dict.fromkeys(PARTS, 0.0)
        self._step_start = 0.0
        self.seconds_before = 0.0  # of the training's earlier parts, evaluations included
        self._train_start: float | None = None

    @property
    def trained_seconds(self) -> float:
        """Seconds of the training, evaluations included, over all parts of a resumed run."""
        return self.seconds_before + (0.0 if self._train_start is None else time.monotonic() - self._train_start)

    def begin_training(self) -> None:
        """Start the clock of the training."""
        self._train_start = time.monotonic()

    def end_training(self) -> None:
        """Stop it."""
        self.seconds_before, self._train_start = self.trained_seconds, None

    def begin_step(self) -> None:
        """Reset the clocks: generation between steps, for held-out cases, belongs to no step."""
        self._step_start = time.monotonic()
        self.clock.take()

    def end_step(self) -> None:
        """Add the step to the totals since the last logging."""
        seconds, parts = time.monotonic() - self._step_start, self.clock.take()
        self.steps += 1
        parts |= {"step": seconds, "optimize": seconds - parts["rollout"]}
        self.total = {part: total + parts[part] for part, total in self.total.items()}

    def take(self, tokens: int) -> dict[str, float]:
        """Mean seconds per step (`time/*`), and how many of `tokens` were sampled per second, since the last call;
        empty without a step."""
        if not self.steps:
            return {}
        metrics = {f"time/{part}": round(seconds / self.steps, 6) for part, seconds in self.total.items()}
        metrics["tokens_per_second"] = round(tokens / max(self.total["step"], 1e-9), 3)
        self.steps, self.total = 0, dict.fromkeys(self.total, 0.0)
        return metrics
