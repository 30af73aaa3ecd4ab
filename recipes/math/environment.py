r"""Competition mathematics (MATH) from the Hub: the answer stands in `\boxed{}`."""

from typing import Any

INSTRUCTION = r"Reason step by step, and put the final answer into \boxed{}."
TINY = [(r"What is $2^3$?", "8"), (r"Simplify $\frac{2}{4}$.", r"\frac{1}{2}")]


class Math:
    """Gives 1.0 for an answer that means the same as the reference, by math-verify where it is installed."""

    def __init__(self, source: str = "DigitalLearningGmbH/MATH-lighteval") -> None:
        self.source = source

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The problems of the training split; `tiny` has two that need no network."""
        return self._rows("train")

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """Those of the test split."""
        return self._rows("test")

    def score_episode(self, text: str, answer: str) -> float:
        """1.0 for the right answer in the last box."""
        return float(means_the_same(boxed(text), answer))

    def _rows(self, split: str) -> list[dict[str, Any]]:
        pairs = TINY * 20 if self.source == "tiny" else self._from_hub(split)
        return [{"prompt": [{"role": "user", "content": f"{q}\n{INSTRUCTION}"}], "answer": a} for q, a in pairs]

    def _from_hub(self, split: str) -> list[tuple[str, str]]:
        from datasets import load_dataset

        found = load_dataset(self.source, split=split)
        return [(row["problem"], boxed(row["solution"])) for row in found]


def boxed(text: str) -> str:
    r"""The content of the last `\boxed{}`, up to its own closing brace; empty without one."""
    _, mark, rest = text.rpartition(r"\boxed{")
    depth = 1
    for place, letter in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return rest[:place].strip()
    return ""


def means_the_same(answer: str, truth: str) -> bool:
    """Whether two LaTeX answers are equal, as mathematics if math-verify is installed, else as text."""
    if not answer:
        return False
    try:
        from math_verify import parse, verify
    except ImportError:
        return "".join(answer.split()) == "".join(truth.split())
    return bool(verify(parse(f"${truth}$"), parse(f"${answer}$")))
