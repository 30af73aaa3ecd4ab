"""How long each part of a step takes: generating, the environment, and the optimization that follows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

PARTS = ("generate", "environment")


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Seconds in which episodes waited for the policy and for their environments, on this process.

    Where episodes do not wait for each other, some wait for the one while some wait for the other: both clocks run, and
    together they show more than has passed. `optimize` is what a step takes beside its rollout, whichever kind it is.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.total = {"step": 0.0, "optimize": 0.0, **dict.fromkeys(PARTS, 0.0)}
        self._begun = 0.0
        self._lap = dict.fromkeys(("rollout", *PARTS), 0.0)

    @contextmanager
    def running(self, *parts: str) -> Iterator[None]:
        """The clocks of these parts run while this lasts."""
        start = time.monotonic()
        try:
            yield
        finally:
            for part in parts:
                self._lap[part] += time.monotonic() - start

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """What was generated between the steps, for held-out scores, is no part of one."""
        self._begun = time.monotonic()
        self._lap = dict.fromkeys(self._lap, 0.0)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Add the step to those that have not been told yet."""
        seconds = time.monotonic() - self._begun
        self.steps += 1
        self.total["step"] += seconds
        self.total["optimize"] += seconds - self._lap["rollout"]
        for part in PARTS:
            self.total[part] += self._lap[part]

    def take(self) -> dict[str, float]:
        """Means a step since the last time, `time/step` and its parts in seconds, and the tokens sampled in a second;
        nothing where there was no step."""
        if not self.steps:
            return {}
        told = {f"time/{part}": round(seconds / self.steps, 6) for part, seconds in self.total.items()}
        told["tokens_per_second"] = round(self.tokens / max(self.total["step"], 1e-9), 3)
        self.steps, self.tokens, self.total = 0, 0, dict.fromkeys(self.total, 0.0)
        return told
