"""Environments that fail, for the tests of failures."""

from __future__ import annotations

import itertools
import os
from typing import Any


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
