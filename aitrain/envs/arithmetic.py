"""The demo environment: two-digit additions in which the units carry over, such as `38 + 47 = ?`.

The tiny model that comes with the package knows what an answer looks like, but mostly forgets the carry.
"""

import random
from typing import Any


class Arithmetic:
    """Asks for a sum and gives 1.0 for exactly the right number, 0.0 for anything else."""

    def __init__(self, cases: int = 1000, held_out: int = 200, seed: int = 0) -> None:
        sums = [(a, b) for a in range(10, 100) for b in range(a, 100) if a % 10 + b % 10 >= 10]
        if cases + held_out > len(sums):
            raise ValueError(f"there are {len(sums)} such sums, fewer than cases={cases} + held_out={held_out}")
        random.Random(seed).shuffle(sums)
        self.held_out = sums[:held_out]  # taken first, so that it stays the same for any number of cases
        self.cases = sums[held_out : held_out + cases]

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """One row per question to train on."""
        return [self._row(a, b) for a, b in self.cases]

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """One row per question kept back from training."""
        return [self._row(a, b) for a, b in self.held_out]

    def score_episode(self, completion: list[dict[str, Any]], answer: str) -> float:
        """1.0 when what the model wrote is the answer; `answer` comes from the row of the same name."""
        return float(completion[-1]["content"].strip() == answer)

    def reference(self, case_idx: int) -> str:
        """The right answer to row `case_idx` of `build_dataset`."""
        return str(sum(self.cases[case_idx]))

    def _row(self, a: int, b: int) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": f"{a} + {b} = ?"}], "answer": str(a + b)}
