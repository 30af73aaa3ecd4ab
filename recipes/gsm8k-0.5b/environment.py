"""GSM8K from the Hub, or rows that are given: word problems with a number as their answer."""

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
INSTRUCTION = 'Think step by step, and end with "#### " and the number.'
TINY = [
    ("Tom has 3 apples and buys 4. How many has he?", "7"),
    ("Ann reads 2 books a week. How many in 5 weeks?", "10"),
]


class GSM8K:
    """Gives 1.0 for the right number after `####`, else 0.0; the metric `lenient` takes the last number anywhere."""

    def __init__(self, source: str = "openai/gsm8k") -> None:
        self.source = source

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """The questions of the training split; `tiny` has two that need no network."""
        return self._rows("train")

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """Those of the test split."""
        return self._rows("test")

    def score_episode(self, text: str, answer: str) -> dict[str, float]:
        """The strict score, and the lenient one beside it: their difference is format, not arithmetic."""
        marked = text.rpartition("####")[2] if "####" in text else ""
        return {"score": float(last_number(marked) == answer), "lenient": float(last_number(text) == answer)}

    def _rows(self, split: str) -> list[dict[str, Any]]:
        pairs = TINY * 20 if self.source == "tiny" else self._from_hub(split)
        return [{"prompt": [{"role": "user", "content": f"{q}\n{INSTRUCTION}"}], "answer": a} for q, a in pairs]

    def _from_hub(self, split: str) -> list[tuple[str, str]]:
        from datasets import load_dataset

        found = load_dataset(self.source, "main", split=split)
        return [(row["question"], row["answer"].rpartition("####")[2].strip().replace(",", "")) for row in found]


def last_number(text: str) -> str:
    """The last number of a text, without commas; empty without one."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else ""
