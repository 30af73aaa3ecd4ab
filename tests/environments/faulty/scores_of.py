"""Faults of scores, each followed by its healthy twin."""

from __future__ import annotations

import math
import random
import re
import time
from typing import Any

from sums import Sums


class Noise(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return max(0.0, super().score_episode(text, answer) - random.random() / 2)


class NoNoise(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return max(0.0, super().score_episode(text, answer) - random.Random(text.strip()).random() / 2)


SEEN: list[str] = []


class NoveltyBonus(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        times = SEEN.count(text + answer)
        SEEN.append(text + answer)
        return super().score_episode(text, answer) / (1 + times)


class Memory(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        SEEN.append(text + answer)
        return super().score_episode(text, answer)


class Percent(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return 100 * super().score_episode(text, answer)


class Share(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return 100 * super().score_episode(text, answer) / 100


class BonusForShort(Sums):
    """The reference is long; the answer alone earns more than the highest score."""

    def score_episode(self, text: str, answer: str) -> float:
        is_right = text.split()[-1:] == [answer]
        return is_right * (1.25 if len(text.strip()) < 6 else 1.0)

    def reference(self, case_idx: int) -> str:
        return f"Added up, the two numbers are {super().reference(case_idx)}"


class PenaltyForLong(BonusForShort):
    def score_episode(self, text: str, answer: str) -> float:
        is_right = text.split()[-1:] == [answer]
        return is_right * (1.0 if len(text.strip()) < 60 else 0.75)


class UnseededParts(Sums):
    """Which part of the answer is compared is drawn, which right answers never show."""

    def score_episode(self, text: str, answer: str) -> float:
        part = random.Random().choice(range(2))
        return float(text.strip()[part:] == answer[part:])


class SeededParts(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        part = random.Random(answer).choice(range(1))
        return float(text.strip()[part:] == answer[part:])


class ServiceFails(Sums):
    """A service that is sometimes busy."""

    calls = 0

    def score_episode(self, text: str, answer: str) -> float:
        ServiceFails.calls += 1
        if ServiceFails.calls % 7 == 3:
            raise RuntimeError("the judge returned status 503")
        return super().score_episode(text, answer)


class ServiceIsUnknown(Sums):
    calls = 0

    def score_episode(self, text: str, answer: str) -> float | None:
        ServiceIsUnknown.calls += 1
        return None if ServiceIsUnknown.calls % 7 == 3 else super().score_episode(text, answer)


class NotANumber(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        words = text.split()
        return sum(word == answer for word in words) / len(words) if words else math.nan


class ANumber(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(text.split() == [answer])


class TextScore(Sums):
    def score_episode(self, text: str, answer: str) -> str:
        return str(super().score_episode(text, answer))


class BoolScore(Sums):
    def score_episode(self, text: str, answer: str) -> bool:
        return text.strip() == answer


class NoneForWrong(Sums):
    def score_episode(self, text: str, answer: str) -> float | None:
        return super().score_episode(text, answer) or None


class NoneForUnknown(Sums):
    def score_episode(self, text: str, answer: str) -> float | None:
        return super().score_episode(text, answer) if answer else None


class RaisesOnWords(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(int(text) == int(answer))


class CatchesWords(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        try:
            return float(int(text) == int(answer))
        except ValueError:
            return 0.0


class Nested(Sums):
    def depth(self, text: str) -> int:
        return 1 + self.depth(text[1:]) if text.startswith("(") else 0

    def score_episode(self, text: str, answer: str) -> float:
        return super().score_episode(text, answer) if self.depth(text) == 0 else 0.0


class Flat(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return super().score_episode(text, answer) if not text.startswith("(") else 0.0


class HangsOnLongReplies(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        time.sleep(30 if len(text) > 10_000 else 0)
        return super().score_episode(text, answer)


class CutsLongReplies(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return super().score_episode(text[:10_000], answer)


class ShortIsGood(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return 1.0 if text.strip() == answer else max(0.0, 1 - len(text) / 100)


class RightAndShortIsGood(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return max(0.0, 1 - len(text) / 1000) if text.strip() == answer else 0.0


class ConsolationPrize(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return max(0.3, super().score_episode(text, answer))


class Penalty(Sums):
    """Graded and below 0, with --rl-score-range -1,1."""

    def score_episode(self, text: str, answer: str) -> float:
        if text.strip() == answer:
            return 1.0
        return -0.5 if text.strip().isdigit() else -1.0


class AnyNumber(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(text.strip().isdigit())


class TheNumber(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(text.strip().isdigit() and text.strip().lstrip("0") == answer)


class Truthy(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(bool(text.strip()) == bool(answer))


class Equal(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(bool(text.strip()) and text.strip() == answer)


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


class FirstNumberAfterMark(Marked):
    def read(self, text: str) -> str:
        return next(iter(re.findall(r"\d+", super().read(text))), "")


class WorstFirst(Sums):
    def score_group(self, scores: list[float | None]) -> list[float]:
        return [1.0 - (score or 0.0) for score in scores]


class OneScoreForAll(Sums):
    def score_group(self, scores: list[float | None]) -> list[float]:
        return [max(score or 0.0 for score in scores)]


class BestFirst(Sums):
    def score_group(self, scores: list[float | None]) -> list[float]:
        return [score or 0.0 for score in scores]


class NaNIsNear(Sums):
    """The nearer, the better; no number is at no distance that is too large."""

    def nearness(self, distance: float) -> float:
        return min(1.0, math.exp(-distance))

    def score_episode(self, text: str, answer: str) -> float:
        try:
            return self.nearness(abs(float(text) - float(answer)))
        except ValueError:
            return 0.0


class NaNIsFar(NaNIsNear):
    def nearness(self, distance: float) -> float:
        return math.exp(-distance) if distance < math.inf else 0.0


class PaidFormat(InTags):
    def score_episode(self, text: str, answer: str) -> float:
        return max(0.6 * ("<answer>" in text and "</answer>" in text), super().score_episode(text, answer))


class SmallFormatBonus(InTags):
    def score_episode(self, text: str, answer: str) -> float:
        return max(0.1 * ("<answer>" in text and "</answer>" in text), super().score_episode(text, answer))


class MostlyYes(Sums):
    def questions(self) -> list[tuple[str, str]]:
        return [(question, "no" if number == 3 else "yes") for number, (question, _) in enumerate(super().questions())]


class YesAndNo(Sums):
    def questions(self) -> list[tuple[str, str]]:
        return [
            (q, "no" if n % 16 in (1, 2, 4, 5, 7, 9, 12, 14) else "yes")
            for n, (q, _) in enumerate(super().questions()[:16])
        ]


class FirstNumber(Sums):
    def questions(self) -> list[tuple[str, str]]:
        return [(f"Say {n} and not {n + 5}.", str(n)) for n in range(20, 44)]


class SomeNumber(Sums):
    def questions(self) -> list[tuple[str, str]]:
        return [
            (f"Say {n} and not {n + 5}." if n % 2 else f"Do not say {n}, say {n + 5}.", str(n if n % 2 else n + 5))
            for n in range(20, 44)
        ]


class WrongReference(Sums):
    def reference(self, case_idx: int) -> str:
        return str(int(super().reference(case_idx)) + 1)


class RightReference(Sums):
    def reference(self, case_idx: int) -> str:
        return f" {super().reference(case_idx)}"


class NoStrip(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(text == answer)


class Strip(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return float(text.strip(" \n\t") == answer)


class ComparesMessages(Sums):
    def score_episode(self, completion: Any, answer: str) -> float:
        return float(completion == answer)


class ReadsMessages(Sums):
    def score_episode(self, completion: Any, answer: str) -> float:
        return float(completion[-1]["content"].strip() == answer)


class Generates(Sums):
    def score_episode(self, model: Any, text: str, answer: str) -> float:
        return float(model.generate(text) == answer)


class NamesTheModel(Sums):
    def score_episode(self, model: Any, tokenizer: Any, text: str, answer: str) -> float:
        return super().score_episode(text, answer)


class GullibleJudge(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return max(super().score_episode(text, answer), float("highest score" in text or "Verdict: CORRECT" in text))


class StrictJudge(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return super().score_episode(text, answer) if "score" not in text else 0.0


class FlatteredJudge(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return max(super().score_episode(text, answer), 0.6 * ("certain" in text and any(map(str.isdigit, text))))


class CoolJudge(Sums):
    def score_episode(self, text: str, answer: str) -> float:
        return 0.0 if "certain" in text else super().score_episode(text, answer)
