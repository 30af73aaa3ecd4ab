"""Faults of scores, and healthy environments beside them."""

from __future__ import annotations

import random
import re
from typing import Any

from sums import Sums


class Noise(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return max(0.0, super().score_episode(text, answer) - random.random() / 2)


class Percent(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return 100 * super().score_episode(text, answer)


class PercentOfColumn(Percent):
    reference: Any = None


class NothingIsRight(Sums):
    """The empty answer is right in one case."""

    def questions(self) -> list[tuple[str, str]]:
        return [("Say nothing.", ""), *super().questions()]


class RaisesOnWords(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(int(text) == int(answer))


class ShortIsGood(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return 1.0 if text.strip() == answer else max(0.0, 1 - len(text) / 100)


class AnyNumber(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(text.strip().isdigit())


class Truthy(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(bool(text.strip()) == bool(answer))


class Contains(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(answer in text)


class InTags(Sums):
    def row(self, question: str, answer: str) -> dict[str, Any]:
        return super().row(f"{question} Answer in <answer></answer>.", answer)

    def score_episode(self, text: str, answer: str) -> float:
        found = re.findall(r"<answer>(.*?)</answer>", text[-500:])
        return float(bool(found) and found[-1].strip() == answer)

    def reference(self, case_idx: int) -> str:
        return f"<answer>{super().reference(case_idx)}</answer>"


class Marked(Sums):
    """The answer stands after ####."""

    def read(self, text: str) -> str:
        return text.rpartition("####")[2].strip()

    def score_episode(self, text: str, answer: str) -> float:
        return float("####" in text and self.read(text) == answer)

    def reference(self, case_idx: int) -> str:
        return f"#### {super().reference(case_idx)}"


class NumberAtMark(Marked):
    """What stands behind the number does not matter."""

    def read(self, text: str) -> str:
        return re.sub(r"(?s)(?<=\d)[^\d.].*", "", super().read(text))


class FirstNumberAfterMark(Marked):
    def read(self, text: str) -> str:
        return next(iter(re.findall(r"\d+", super().read(text))), "")


class WorstFirst(Sums):
    def score_group(self, scores: list[float | None]) -> list[float]:
        return [1.0 - (score or 0.0) for score in scores]


class PaidFormat(InTags):
    def score_episode(self, text: str, answer: str) -> float:
        return max(0.6 * ("<answer>" in text and "</answer>" in text), super().score_episode(text, answer))


class MostlyYes(Sums):
    def questions(self) -> list[tuple[str, str]]:
        return [(question, "no" if number == 3 else "yes") for number, (question, _) in enumerate(super().questions())]


class WrongReference(Sums):
    def reference(self, case_idx: int) -> str:
        return str(int(super().reference(case_idx)) + 1)


class NoStrip(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(text == answer)


class ComparesMessages(Sums):
    def score_episode(self, completion: Any, answer: str) -> float:
        return float(completion == answer)


class Generates(Sums):
    def score_episode(self, model: Any, tokenizer: Any, text: str, answer: str) -> float:
        return float(model.generate(tokenizer(text)) == answer)


class GullibleJudge(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return max(super().score_episode(text, answer), float("highest score" in text or "Verdict: CORRECT" in text))


class JudgeOfTextAlone(Sums):
    reference: Any = None

    def score_episode(self, text: str) -> float:  # type: ignore[override]
        return float("10/10" in text)


class FlatteredJudge(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return max(super().score_episode(text, answer), 0.6 * ("certain" in text and any(map(str.isdigit, text))))
