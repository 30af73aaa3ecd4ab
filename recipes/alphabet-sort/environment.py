"""Names come in over several turns; after each, all names so far are to be written in alphabetical order."""

import random
from collections.abc import Generator
from typing import Any

TEXT = """
Ada Ben Cleo Dan Eve Finn Gina Hugo Iris Jack Kara Liam Mona Nils Olga Paul Quinn Rosa Sven Tara Uma Vera Will Xena
Yara Zeno Amir Bela Cora Dirk Elsa Fred Greta Hans Ines Joel Kira Lars Mina Noah
"""
NAMES = TEXT.split()


class AlphabetSort:
    """Gives the mean over the turns of the share of names that stand at their places."""

    def __init__(self, cases: int = 500, turns: int = 3, names: int = 3, seed: int = 0) -> None:
        chosen = random.Random(seed)
        self.rounds = [self._rounds(chosen.sample(NAMES, turns * names), names) for _ in range(cases)]

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """One row per conversation; the first names are in its prompt."""
        return [{"prompt": [{"role": "user", "content": ask(rounds[0])}], "case_idx": n} for n, rounds in self._all()]

    def episode(self, case_idx: int, seed: int) -> Generator[str | None, str, float]:
        """Asks for the sorted list after each group of names."""
        seen: list[str] = []
        shares = []
        message = None
        for number, names in enumerate(self.rounds[case_idx]):
            seen = sorted([*seen, *names])
            shares.append(share_in_place((yield message), seen))
            following = self.rounds[case_idx][number + 1 : number + 2]
            message = f"More names: {', '.join(following[0])}. Write all names so far again." if following else None
        return sum(shares) / len(shares)

    def reference(self, case_idx: int) -> list[str]:
        """The sorted list of each turn."""
        rounds = self.rounds[case_idx]
        return [
            "\n".join(sorted(name for names in rounds[: turn + 1] for name in names)) for turn in range(len(rounds))
        ]

    def _all(self) -> list[tuple[int, list[list[str]]]]:
        return list(enumerate(self.rounds))

    def _rounds(self, names: list[str], size: int) -> list[list[str]]:
        return [names[start : start + size] for start in range(0, len(names), size)]


def ask(names: list[str]) -> str:
    """The first question."""
    return f"Sort these names alphabetically, one a line and nothing else: {', '.join(names)}."


def share_in_place(reply: str, wanted: list[str]) -> float:
    """Share of the lines that are right; too many lines are wrong ones."""
    lines = [line.strip() for line in reply.strip().splitlines() if line.strip()]
    right = sum(line == name for line, name in zip(lines, wanted, strict=False))
    return right / max(len(lines), len(wanted))
