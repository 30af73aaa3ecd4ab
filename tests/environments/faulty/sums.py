"""A healthy environment of sums, which the faulty ones change in one place."""

from __future__ import annotations

from typing import Any


class Sums:
    """Asks for a sum; 1.0 for the right number, in any surrounding space."""

    def questions(self) -> list[tuple[str, str]]:
        return [(f"What is {n} + {3 * n + 11}?", str(4 * n + 11)) for n in range(13, 37)]

    def row(self, question: str, answer: str) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": question}], "answer": answer}

    def build_dataset(self) -> list[dict[str, Any]]:
        return [self.row(*pair) for pair in self.questions()]

    def does(self, text: str, answer: str) -> None:
        """What it does beside the score."""

    def score_episode(self, text: str, answer: str) -> Any:
        self.does(text, answer)
        return float(text.strip() == answer)

    def reference(self, case_idx: int) -> Any:
        return self.questions()[case_idx][1]
