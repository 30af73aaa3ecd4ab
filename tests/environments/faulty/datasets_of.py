"""Faults of datasets, and healthy environments beside them."""

from __future__ import annotations

import random
from typing import Any

from sums import Sums


class LastWordOfAssistant(Sums):
    def row(self, question: str, answer: str) -> dict[str, Any]:
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": "Let me see."}]
        return {"prompt": said, "answer": answer}


class NoneOfThese(Sums):
    """Prompts come twice, and held-out ones only there."""

    def questions(self) -> list[tuple[str, str]]:
        *others, last = super().questions()
        return [*others, *others, *[last] * 5]

    def build_dataset(self) -> list[dict[str, Any]]:
        return super().build_dataset()[:-5]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return super().build_dataset()[-5:]


class FewPrompts(Sums):
    def questions(self) -> list[tuple[str, str]]:
        return super().questions()[:6] * 10


class TrainedOnHeldOut(Sums):
    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return self.build_dataset()[:5]


class AnswerInPrompt(Sums):
    def row(self, question: str, answer: str) -> dict[str, Any]:
        return super().row(f"{question} (answer: {answer})", answer)


class ChoicesInPrompt(Sums):
    def row(self, question: str, answer: str) -> dict[str, Any]:
        choices = sorted({int(answer), int(answer) + 1, int(answer) - 7})
        return super().row(f"{question} Choose one of {choices}.", answer)


class OrderOfASet(Sums):
    def questions(self) -> list[tuple[str, str]]:
        return list(set(super().questions()))


class KeyOfTheProcess(Sums):
    """Rows are always the same, and what is right depends on the process."""

    def __init__(self) -> None:
        self.shift = random.randrange(1_000_000)

    def score_episode(self, text: str, answer: str) -> float:
        return float(text.strip() == str(int(answer) + self.shift))

    def reference(self, case_idx: int) -> str:
        return str(int(super().reference(case_idx)) + self.shift)
