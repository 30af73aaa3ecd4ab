"""Reward functions by name, for rows with `ground_truth`: exact rules for how data sets mark the final answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

Completion = str | list[dict[str, object]]
"""An answer: text for a prompt that is text, else messages."""
NUMBER = re.compile(r"#### (-?[0-9.,]+)")


def gsm8k(completions: Sequence[Completion], ground_truth: Sequence[object], **others: object) -> list[float]:
    """1.0 if the last `#### number` within the last 300 characters is the ground truth, commas aside."""
    truths = [str(truth).replace(",", "") for truth in ground_truth]
    return [_equal(_last_number(text_of(one)), truth) for one, truth in zip(completions, truths, strict=True)]


def boxed(completions: Sequence[Completion], ground_truth: Sequence[object], **others: object) -> list[float]:
    r"""1.0 if the content of the last `\boxed{...}` is the ground truth, white space aside."""
    return [_equal(_last_boxed(text_of(one)), truth) for one, truth in zip(completions, ground_truth, strict=True)]


RULES = {"gsm8k": gsm8k, "boxed": boxed}
"""The functions that `--rl-env reward:NAME` knows."""
EXAMPLES = {"gsm8k": "#### {}", "boxed": r"\boxed{{{}}}"}
"""A right answer by each rule."""


def text_of(completion: Completion) -> str:
    """The text of a completion: a string, or the last message."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


def _equal(answer: str | None, truth: object) -> float:
    return float(answer is not None and answer == "".join(str(truth).split()))


def _last_number(text: str) -> str | None:
    found = NUMBER.findall(text[-300:])
    return found[-1].replace(",", "") if found else None


def _last_boxed(text: str) -> str | None:
    """The content of the last box, up to its own closing brace."""
    _, mark, rest = text.rpartition(r"\boxed{")
    depth = 1
    for place, letter in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return "".join(rest[:place].split())
    return None
