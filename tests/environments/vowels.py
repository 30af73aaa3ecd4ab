"""Small environments that the training tests run on."""

from typing import Any


class Vowels:
    """String prompts; the score is the share of letters below `n` in the answer, so that random models differ."""

    def __init__(self, cases: int = 24) -> None:
        self.cases = cases

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(self.cases)]

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"tell {number}:"} for number in range(3)]

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        return sum(letter < "n" for letter in completion) / max(1, len(completion))


class ChatVowels(Vowels):
    """The same with chat prompts."""

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in super().build_dataset(tokenizer)]

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": "tell:"}]}]

    def score_episode(self, text: str) -> float:  # type: ignore[override]
        return sum(letter < "n" for letter in text) / max(1, len(text))
