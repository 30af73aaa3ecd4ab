"""What both sides of overhead.py train on: some prompts, a reward for letters, a stopwatch in the reward.

A step is timed from one scoring of a batch to the next, by the same lines on both sides.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any


class Letters:
    """Asks for words and scores the share of letters in the answer, so that a model of random weights gets rewards."""

    def __init__(self, clock: str, completions_per_step: int, chat: bool = True) -> None:
        self.clock = Path(clock)
        self.completions_per_step = completions_per_step
        self.chat = chat
        self.scored = 0
        self.seen = 0  # a sum, as aitrain scores at the same time what plain TRL scores in order
        self.lock = threading.Lock()

    def build_dataset(self, tokenizer: Any = None) -> list[dict[str, Any]]:
        """One row per prompt."""
        asked = [f"word {number}" for number in range(200)]
        return [{"prompt": [{"role": "user", "content": text}] if self.chat else text} for text in asked]

    def score_episode(self, completion: list[dict[str, Any]] | str) -> float:
        """The share of ASCII letters, 0 to 1."""
        text = completion if isinstance(completion, str) else str(completion[-1]["content"])
        digest = hashlib.sha256(text.encode(errors="replace")).digest()
        with self.lock:
            if self.scored % self.completions_per_step == 0:
                self._note_time()
            self.scored += 1
            self.seen = (self.seen + int.from_bytes(digest, "big")) % 2**256
        return sum(letter.isascii() and letter.isalpha() for letter in text) / max(1, len(text))

    def _note_time(self) -> None:
        """One line a step: a GPU's memory, both clocks of this process, and a digest of all completions until now."""
        memory = _gpu_peak()
        clocks = {"wall": time.perf_counter(), "cpu": time.process_time()}
        line = {**memory, **clocks, "seen": f"{self.seen:064x}"}
        with self.clock.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _gpu_peak() -> dict[str, float]:
    """The most MiB that tensors took since the last time, once all is done that the GPU was asked for; nothing on a
    machine without one. The training has imported torch; to do so here would take from its first step."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_available():
        return {}
    cuda.synchronize()
    peak = cuda.max_memory_allocated() / 2**20
    cuda.reset_peak_memory_stats()
    return {"gpu_mib": peak}
