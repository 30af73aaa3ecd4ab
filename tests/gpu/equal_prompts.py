"""An environment whose prompts are all equally long, so that memory can be planned."""

from typing import Any


class EqualPrompts:
    """32 letters ask for any answer; the score is a share of its letters, so that random models differ."""

    def build_dataset(self) -> list[dict[str, Any]]:
        """One row per prompt."""
        return [{"prompt": f"{number:032d}"} for number in range(40)]

    def score_episode(self, completion: str) -> float:
        """0 to 1."""
        return sum(letter < "n" for letter in completion) / max(1, len(completion))
