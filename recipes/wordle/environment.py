"""Wordle: find a word of five letters in six guesses, told which letters are right."""

import random
import re
from collections import Counter
from collections.abc import Generator
from typing import Any

TEXT = """
about above actor acute admit adopt after again agent agree ahead alarm album alert alike alive allow alone along
angle apart apple apply arena argue arise aside asset avoid award aware badly baker basic beach began begin being
below bench birth black blame blind block blood board boost bound brain brand bread break breed brief bring broad
brown brush build buyer cabin cable carry catch cause chain chair chart chase cheap check chest chief child china
claim class clean clear click clock close coach coast count court cover craft crash cream crime cross crowd crown
curve cycle daily dance death delay depth doubt dozen draft drama dream dress drink drive earth eight elite empty
enemy enjoy enter entry equal error event every exact exist extra faith false fault field fifth fight final first
flame flash fleet floor fluid focus force forth frame fresh front fruit funny giant given glass globe grace grade
grain grand grant grass great green gross group guard guess guest guide happy heart heavy horse hotel house human
"""
WORDS = TEXT.split()
GUESS = re.compile(r"<guess>\s*([a-z]{5})\s*</guess>", re.IGNORECASE)


class Wordle:
    """Gives 1.0 for the word at once and less for each further guess; a tenth of the green letters if it is missed."""

    def __init__(self, guesses: int = 6, seed: int = 0) -> None:
        self.guesses = guesses
        self.words = random.Random(seed).sample(WORDS, len(WORDS))

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """One row per word, which is not in the prompt."""
        text = (
            f"Find a word of five letters in {self.guesses} guesses. After each guess you see it again with G under a"
            " letter at its place, Y under one that is elsewhere, and - under one that is not in the word."
            " Guess like <guess>crane</guess>."
        )
        return [{"prompt": [{"role": "user", "content": text}], "word": word, "case_idx": n}
                for n, word in enumerate(self.words)]  # fmt: skip

    def episode(self, word: str, seed: int) -> Generator[str | None, str, float]:
        """Takes guesses and answers with their colours."""
        message, green = None, 0
        for number in range(self.guesses):
            found = GUESS.findall((yield message))
            guess = found[-1].lower() if found else ""
            if guess == word:
                return 1.0 - 0.1 * number
            if not guess:
                message = "Guess like <guess>crane</guess>."
                continue
            marks = colours(guess, word)
            green = max(green, marks.count("G"))
            message = f"{' '.join(guess)}\n{' '.join(marks)}"
        return green / 50

    def reference(self, case_idx: int) -> list[str]:
        """The word."""
        return [f"<guess>{self.words[case_idx]}</guess>"]


def colours(guess: str, word: str) -> str:
    """G, Y or - for each letter; a letter is marked as often as the word has it."""
    left = Counter(letter for letter, own in zip(word, guess, strict=True) if letter != own)
    marks = []
    for letter, own in zip(guess, word, strict=True):
        mark = "G" if letter == own else "Y" if left[letter] else "-"
        left[letter] -= mark == "Y"
        marks.append(mark)
    return "".join(marks)
