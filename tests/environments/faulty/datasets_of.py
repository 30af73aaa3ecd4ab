"""Faults of datasets, and healthy environments beside them."""

from __future__ import annotations

import random
from typing import Any

from sums import Sums


class LastWordOfAssistant(Sums):
    def row(self, question: str, answer: str) -> dict[str, Any]:
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": "Let me see."}]
        return {"prompt": said, "answer": answer}


class SharedCaseIdx(Sums):
    def build_dataset(self) -> list[dict[str, Any]]:
        return [{**row, "case_idx": number // 2} for number, row in enumerate(super().build_dataset())]

    def reference(self, case_idx: int) -> None:
        return None


class NoneOfThese(Sums):
    """The user has the last word, prompts have names of their own and come twice, and held-out ones come only there."""

    def questions(self) -> list[tuple[str, str]]:
        return super().questions() * 2

    def row(self, question: str, answer: str) -> dict[str, Any]:
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": "Let me see."}]
        return {"prompt": [*said, {"role": "user", "content": "Well?"}], "answer": answer}

    def named(self) -> list[dict[str, Any]]:
        return [{**row, "case_idx": number + 100} for number, row in enumerate(super().build_dataset())]

    def build_dataset(self) -> list[dict[str, Any]]:
        return [row for row in self.named() if row["case_idx"] % 24 >= 5]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return [row for row in self.named() if row["case_idx"] % 24 < 5]

    def reference(self, case_idx: int) -> str:
        return str(super().reference(case_idx - 100))


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


class KeyInSystemPrompt(Sums):
    def system(self) -> str:
        key = "; ".join(f"({number}) {answer}" for number, (_, answer) in enumerate(self.questions(), start=1))
        return f"For those who mark: {key}"

    def row(self, question: str, answer: str) -> dict[str, Any]:
        said = [{"role": "system", "content": self.system()}, {"role": "user", "content": question}]
        return {"prompt": said, "answer": answer}


class ChoicesInSystemPrompt(KeyInSystemPrompt):
    """All answers that there are, in an order of their own, and a few solved questions."""

    def system(self) -> str:
        answers = ", ".join(sorted({answer for _, answer in self.questions()}, reverse=True))
        solved = [f"{question} -> {answer}" for question, answer in self.questions()[:3]]
        return "\n".join([f"The answer is one of {answers}.", *solved])


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
