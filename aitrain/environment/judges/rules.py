"""Rules that compare one answer with the ground truth of its row; each returns 1.0 or 0.0."""

import logging
import re
import threading
from collections.abc import Callable

NUMBER = re.compile(r"#### (-?[0-9.,]+)")
MATH_CHARACTERS = 3000
"""Characters at the end of an answer that math-verify reads: its time grows with the length."""
MATH_SECONDS = 5
"""Seconds for parsing or comparing; only in the main thread of a process, as math-verify measures them by a signal."""


def exact(text: str, ground_truth: object) -> float:
    """1.0 if the whole answer is the ground truth, white space at both ends aside."""
    return float(text.strip() == str(ground_truth).strip())


def gsm8k(text: str, ground_truth: object) -> float:
    """1.0 if the last `#### number` within the last 300 characters is the ground truth, commas aside."""
    found = NUMBER.findall(text[-300:])
    return float(bool(found) and found[-1].replace(",", "") == "".join(str(ground_truth).replace(",", "").split()))


def boxed(text: str, ground_truth: object) -> float:
    r"""1.0 if the content of the last `\boxed{...}`, up to its own closing brace, is the ground truth, white space
    aside."""
    _, mark, rest = text.rpartition(r"\boxed{")
    depth = 1
    for place, letter in enumerate(rest if mark else ""):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth == 0:
            return float("".join(rest[:place].split()) == "".join(str(ground_truth).split()))
    return 0.0


def math(text: str, ground_truth: object) -> float:
    r"""1.0 if math-verify finds that the answer has the value of the ground truth: 1/2, 0.5 and \frac{1}{2} are equal.

    Raises:
        ValueError: the ground truth cannot be read as mathematics.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs each answer that it cannot read
    seconds = MATH_SECONDS if threading.current_thread() is threading.main_thread() else None
    truth = str(ground_truth)
    expected = parse(truth if "boxed" in truth or "$" in truth else rf"\boxed{{{truth}}}", parsing_timeout=seconds)
    if not expected:
        raise ValueError(f"math-verify cannot read the ground truth {truth[:60]!r}")
    found = parse(text[-MATH_CHARACTERS:], parsing_timeout=seconds)
    return float(verify(expected, found, timeout_seconds=seconds))


RULES: dict[str, Callable[..., float]] = {"exact": exact, "gsm8k": gsm8k, "boxed": boxed, "math": math}
"""Rules by name."""
EXAMPLES = {"exact": "{}", "gsm8k": "#### {}", "boxed": r"\boxed{{{}}}", "math": r"\boxed{{{}}}"}
"""A right answer by each rule, with the ground truth in the place of the braces."""
SOURCES = {
    "openai/gsm8k": "gsm8k",
    "math_dapo": "math",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
}
"""The rule for rows of well-known data sets, by their `data_source`."""
