"""Measures the parts of a step: generation, environment and optimization."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

PARTS = ("generate", "environment")


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Seconds per step in which episodes waited for the policy and for their environments, on this process.

    With free-running episodes both clocks may run at the same time, so that the parts can add up to more than the step.
    `optimize` is the time of a step outside its rollout.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.total = {"step": 0.0, "optimize": 0.0, **dict.fromkeys(PARTS, 0.0)}
        self._step_start = 0.0
        self._lap = dict.fromkeys(("rollout", *PARTS), 0.0)

    @contextmanager
    def running(self, *parts: str) -> Iterator[None]:
        """Add the duration of this context to the given parts."""
        start = time.monotonic()
        try:
            yield
        finally:
            for part in parts:
                self._lap[part] += time.monotonic() - start

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Reset the clocks: generation between steps, for held-out cases, belongs to no step."""
        self._step_start = time.monotonic()
        self._lap = dict.fromkeys(self._lap, 0.0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Add the step to the totals since the last logging."""
        seconds = time.monotonic() - self._step_start
        self.steps += 1
        self.total["step"] += seconds
        self.total["optimize"] += seconds - self._lap["rollout"]
        for part in PARTS:
            self.total[part] += self._lap[part]

    def take(self) -> dict[str, float]:
        """Mean seconds per step (`time/*`) and tokens sampled per second since the last call; empty without a step."""
        if not self.steps:
            return {}
        metrics = {f"time/{part}": round(seconds / self.steps, 6) for part, seconds in self.total.items()}
        metrics["tokens_per_second"] = round(self.tokens / max(self.total["step"], 1e-9), 3)
        self.steps, self.tokens, self.total = 0, 0, dict.fromkeys(self.total, 0.0)
        return metrics
