"""Countdown: reach a target with some numbers, each used once, and + - * /."""

import ast
import operator
import random
import re
from collections import Counter
from fractions import Fraction
from typing import Any

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Countdown:
    """Gives 1.0 for an expression of the numbers that equals the target, 0.1 for a wrong one in the right form."""

    def __init__(self, cases: int = 4000, numbers: int = 4, highest: int = 100, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.puzzles = [self._puzzle(numbers, highest) for _ in range(cases)]

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        """One row per puzzle; each has a solution, as it was made from one."""
        return [
            {
                "prompt": [{"role": "user", "content": prompt(numbers, target)}],
                "numbers": numbers,
                "target": target,
                "solution": solution,
            }
            for numbers, target, solution in self.puzzles
        ]

    def score_episode(self, text: str, numbers: list[int], target: int) -> float:
        """Scores the last <answer>."""
        found = ANSWER.findall(text[-1000:])
        if not found:
            return 0.0
        used, value = evaluate(found[-1].partition("=")[0].strip())
        if value is None or Counter(used) != Counter(numbers):
            return 0.1
        return 1.0 if value == target else 0.1

    def reference(self, case_idx: int) -> str:
        """The expression that the puzzle was made from."""
        return f"<answer>{self.puzzles[case_idx][2]}</answer>"

    def _puzzle(self, count: int, highest: int) -> tuple[list[int], int, str]:
        while True:
            numbers = [self.random.randint(1, highest) for _ in range(count)]
            expression = str(numbers[0])
            for number in numbers[1:]:
                expression = f"({expression} {self.random.choice('+-*')} {number})"
            _, value = evaluate(expression)
            if value is not None and 1 <= value <= 10 * highest:
                return self.random.sample(numbers, count), int(value), expression


def prompt(numbers: list[int], target: int) -> str:
    """The question."""
    given = ", ".join(map(str, numbers))
    return (
        f"Using each of the numbers {given} exactly once, and + - * / and brackets, write an expression that equals"
        f" {target}. Think first, then answer like <answer>(1 + 2) * 3</answer>."
    )


def evaluate(expression: str) -> tuple[list[int], Fraction | None]:
    """The numbers of an expression, and its value; None for anything but numbers and the four operators."""
    used: list[int] = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return Fraction(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        raise ValueError("not arithmetic")

    try:
        if len(expression) > 200:
            return used, None
        return used, value(ast.parse(expression, mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return used, None
