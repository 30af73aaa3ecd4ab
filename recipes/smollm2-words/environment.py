"""A noun is to be described in exactly N words; a sentence of another length is sent back once."""

from collections.abc import Generator

TEXT = """
bridge river storm bread teacher garden window market violin winter
forest island doctor candle desert horse kitchen lantern mountain museum
ocean painter pencil planet rabbit school shadow soldier spider station
summer temple ticket tower train valley village wagon whale writer
"""
NOUNS = TEXT.split()


class Words:
    """Gives 1 for a sentence of exactly N words, 1 / (1 + D) for one that misses N by D, and half without the noun.

    The last sentence counts. A model that ignores N and always writes 6 words earns 0.53.
    """

    def __init__(self, fewest: int = 4, most: int = 8) -> None:
        self.lengths = range(fewest, most + 1)

    def build_dataset(self) -> list[dict[str, object]]:
        """One row for each noun and length."""
        return [row(noun, length) for length in self.lengths for noun in NOUNS]

    def episode(self, noun: str, length: int) -> Generator[str | None, str, float]:
        """The first `yield` says nothing, as the prompt has just been said, and gets the first sentence."""
        score = closeness((yield None), noun, length)
        return score if score == 1 else closeness((yield f"Write {length} words."), noun, length)

    def reference(self, case_idx: int) -> list[str]:
        """A sentence of the right length."""
        asked = self.build_dataset()[case_idx]
        return [" ".join(["very"] * (int(str(asked["length"])) - 1) + [str(asked["noun"])])]


def row(noun: str, length: int) -> dict[str, object]:
    """The question, and the noun and the length that are asked for."""
    system = {"role": "system", "content": "Answer with one sentence."}
    asked = {"role": "user", "content": f"Describe a {noun} in exactly {length} words."}
    return {"prompt": [system, asked], "noun": noun, "length": length}


def closeness(sentence: str, noun: str, length: int) -> float:
    """1 for the right number of words, less for each word too many or missing, half of it without the noun; 0 for a
    sentence about the number of words, such as the question itself."""
    if "words" in sentence.lower():
        return 0.0
    missed = abs(len(sentence.split()) - length)
    return (1.0 if noun in sentence.lower() else 0.5) / (1 + missed)
