"""The smallest environment of several turns: guess a number, being told "higher" or "lower" until it is found."""

from collections.abc import Generator
from typing import Any


class GuessNumber:
    """Thinks of a number from 1 to `highest`; 1.0 for the right one at once, less for each guess that missed."""

    def __init__(self, highest: int = 7, guesses: int = 4) -> None:
        self.highest, self.guesses = highest, guesses

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """One row for each number; its `case_idx` is the number itself."""
        text = f"I think of a number from 1 to {self.highest}. Which one? Answer with a number only."
        prompt = [{"role": "user", "content": text}]
        return [{"prompt": prompt, "case_idx": number} for number in range(1, self.highest + 1)]

    def episode(self, case_idx: int, seed: int) -> Generator[str | None, str, float]:
        """The first `yield` says nothing, as the prompt has just been said, and gets the first guess."""
        hint = None
        for missed in range(self.guesses):
            guess = (yield hint).strip()
            if guess == str(case_idx):
                return 1 - missed / self.guesses
            if guess in map(str, range(1, self.highest + 1)):
                hint = "higher" if int(guess) < case_idx else "lower"
            else:
                hint = f"Say a number from 1 to {self.highest}."
        return 0.0

    def reference(self, case_idx: int) -> list[str]:
        """The replies of someone who knows the number."""
        return [str(case_idx)]
