"""Arithmetic that the model cannot do in its head, with a calculator as its tool."""

import operator
import random
import re

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
WORDS = {"+": "plus", "-": "minus", "*": "times"}
CALL = '<tool_call>{"name": "calc", "arguments": {"x": "%s"}}</tool_call>'


class Calculator:
    """Asks in words for the value of an expression, which the tool takes in signs.

    Two solved questions in the prompt show how the tool is called; none of them has a "minus".
    """

    def __init__(self, cases: int = 400, seed: int = 0) -> None:
        self.cases, self.seed = cases, seed

    def build_dataset(self) -> list[dict[str, object]]:
        """One row for each expression; no two are equal."""
        draw = random.Random(self.seed)
        expressions: dict[str, None] = {}
        while len(expressions) < self.cases:
            sign = draw.choice(list(OPERATIONS))
            expressions[f"{draw.randint(11, 99)} {sign} {draw.randint(11, 99)}"] = None
        return [{"prompt": prompt(expression), "expression": expression} for expression in expressions]

    def reference(self, case_idx: int) -> list[str]:
        """The call, and its result."""
        expression = str(self.build_dataset()[case_idx]["expression"])
        return [CALL % expression, str(value(expression))]

    def start(self, expression: str) -> "Question":
        """One episode."""
        return Question(expression)


class Question:
    """Gives 0.4 for the call that was needed, and 1 if its result is the answer as well."""

    def __init__(self, expression: str) -> None:
        self.expression, self.was_computed, self.answer = expression, False, ""

    def get_tools(self) -> list[object]:
        """The calculator alone."""
        return [self.calc]

    def calc(self, x: str) -> str:
        """Compute.

        Args:
            x: Two numbers with +, - or * between them.
        """
        result = value(x)
        self.was_computed = self.was_computed or result == value(self.expression)
        return "not an expression" if result is None else str(result)

    def step(self, reply: str) -> None:
        """An answer without a call ends the episode."""
        self.answer = reply

    def score(self) -> float:
        """From 0 to 1."""
        if not self.was_computed:
            return 0.0
        return 1.0 if self.answer.strip() == str(value(self.expression)) else 0.4


def prompt(expression: str) -> list[dict[str, str]]:
    """Two solved questions, and one to solve."""
    messages = [{"role": "system", "content": "Use the tool."}]
    for solved in ("2 + 3", "91 * 4"):
        messages += said(solved, CALL % solved, str(value(solved)))
    return [*messages, {"role": "user", "content": in_words(expression)}]


def said(expression: str, call: str, result: str) -> list[dict[str, str]]:
    """A question that was solved with the tool."""
    roles = ("user", "assistant", "tool", "assistant")
    texts = (in_words(expression), call, result, result)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def in_words(expression: str) -> str:
    """`What is 2 plus 3?` for `2 + 3`."""
    left, sign, right = expression.split()
    return f"What is {left} {WORDS[sign]} {right}?"


def value(expression: str) -> int | None:
    """The value of an expression of two numbers; None if it is none."""
    found = re.fullmatch(r"\s*(-?\d{1,9})\s*([-+*])\s*(-?\d{1,9})\s*", expression)
    return None if found is None else OPERATIONS[found[2]](int(found[1]), int(found[3]))
