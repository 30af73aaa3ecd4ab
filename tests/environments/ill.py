"""Environments that fail, for the tests of failures."""

from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path
from typing import Any

SHARES = {"raise": 0.1, "sleep": 0.05, "spin": 0.05, "nan": 0.1, "kill": 0.02}
"""How many of the episodes fall ill, and of what. `sleep` and `spin` have no end, and `spin` keeps the GIL."""


def illness_of(case_idx: int, completion: str, shares: dict[str, float]) -> str | None:
    """What befalls the episode in which this was answered to this case."""
    chance = random.Random(f"{case_idx}-{completion}").random()
    for name, share in shares.items():
        chance -= share
        if chance < 0:
            return name
    return None


def befall(illness: str) -> float:
    """Fall ill; some illnesses have a score."""
    if illness == "raise":
        raise RuntimeError("ill")
    while illness == "sleep":
        time.sleep(3600)
    while illness == "spin":
        pow(3, 10**7)  # one long step of C
    if illness == "kill":
        os.kill(os.getpid(), 9)
    return float("nan")


class Ill:
    """Some episodes fall ill; the rest are worth the share of letters below `n` in the answer."""

    def __init__(self, notes: str, shares: dict[str, float] | None = None) -> None:
        self.notes, self.shares = Path(notes), shares or SHARES

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}:"} for number in range(48)]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"tell {number}:", "case_idx": -1} for number in range(8)]

    def score_episode(self, completion: str, case_idx: int) -> float:
        for pid in (os.getpid(), os.getppid()):
            (self.notes / str(pid)).touch()
        illness = illness_of(case_idx, completion, self.shares) if case_idx >= 0 else None
        return befall(illness) if illness else sum(letter < "n" for letter in completion) / max(1, len(completion))


class Gone:
    """Works for the held-out cases, if at all, and in training for a number of calls."""

    def __init__(self, calls: int = 0, held_out: bool = True) -> None:
        self.calls, self.held_out = calls, held_out
        self.numbers = itertools.count()

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"say {number}"} for number in range(24)]

    def build_eval_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": "say it", "case_idx": -1}]

    def score_episode(self, completion: str, case_idx: int) -> float:
        works = next(self.numbers) < self.calls if case_idx >= 0 else self.held_out
        if not works:
            raise RuntimeError("the board is gone")
        return len(completion) % 5 / 5


class Hung(Gone):
    """Works for the held-out cases; in training every call hangs, with locks that nobody else needs."""

    concurrent = True  # so that they hang at the same time

    def score_episode(self, completion: str, case_idx: int) -> float:
        while case_idx >= 0:
            time.sleep(3600)  # for ever
        return 0.5


print("said by the module")


class Loud:
    """Prints wherever it can, also from a program that it runs."""

    def __init__(self) -> None:
        print("said by __init__")

    def build_dataset(self) -> list[dict[str, Any]]:
        print("said by build_dataset")
        answer_with_a_call()
        return [{"prompt": [{"role": "user", "content": f"say {number}"}]} for number in range(24)]

    def start(self) -> Loud:
        print("said by start")
        return Loud()

    def get_tools(self) -> list[Any]:
        print("said by get_tools")
        return [self.look]

    def look(self) -> str:
        """Look around."""
        print("said by the tool")
        os.system("echo said by a program; echo said by a program to stderr >&2")
        return "nothing"

    def step(self, reply: str) -> None:
        print("said by step")

    async def score(self) -> float:
        print("said by score", flush=True)
        return 0.5

    def close(self) -> None:
        print("said by close")


def answer_with_a_call() -> None:
    """Let the model call the tool, and then say something."""
    from aitrain.engines.hf import HFEngine
    from aitrain.rollout.engine import Completion

    def answers(self: HFEngine, rows: list[Any], *_: Any) -> list[Completion]:
        call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
        given = [self.policy.tokenizer.decode(row.prompt_ids) for row in rows]
        said = ["well<|im_end|>" if "<tool_call>\n" in text.split("<|im_start|>user")[1] else call for text in given]
        return [Completion(ids) for ids in self.policy.tokenizer(said, add_special_tokens=False)["input_ids"]]

    HFEngine.sample = answers  # type: ignore[method-assign]
