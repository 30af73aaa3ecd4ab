"""How long each part of a step takes: generating, the environment, and the optimization that follows."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from aitrain.rollout.clock import RolloutClock

PARTS = ("generate", "environment")


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Seconds in which episodes waited for the policy and for their environments, on this process.

    Where episodes do not wait for each other, both parts run at the same time, and together they show more than has
    passed. `optimize` is what a step takes beside its rollout.
    """

    def __init__(self, clock: RolloutClock) -> None:
        self.steps = 0
        self.clock = clock
        self.total = {"step": 0.0, "optimize": 0.0, **dict.fromkeys(PARTS, 0.0)}
        self._begun = 0.0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """What was generated between the steps, for held-out scores, is no part of one."""
        self._begun = time.monotonic()
        self.clock.take()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add the step to those that were not logged yet."""
        seconds, parts = time.monotonic() - self._begun, self.clock.take()
        self.steps += 1
        self.total["step"] += seconds
        self.total["optimize"] += seconds - parts["rollout"]
        for part in PARTS:
            self.total[part] += parts[part]

    def take(self, tokens: int) -> dict[str, float]:
        """Means of the steps since the last call: `time/step` and its parts in seconds, and of the `tokens` sampled in
        them per second; nothing if there was no step."""
        if not self.steps:
            return {}
        means = {f"time/{part}": round(seconds / self.steps, 6) for part, seconds in self.total.items()}
        means["tokens_per_second"] = round(tokens / max(self.total["step"], 1e-9), 3)
        self.steps, self.total = 0, dict.fromkeys(self.total, 0.0)
        return means
