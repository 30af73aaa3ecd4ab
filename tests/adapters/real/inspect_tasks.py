"""Tasks of Inspect, one of each kind that the adapter has to run."""

from __future__ import annotations

from typing import Any

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, get_model
from inspect_ai.scorer import Score, includes, match, mean, scorer
from inspect_ai.solver import generate, system_message
from inspect_ai.tool import ToolDef, tool


@tool
def add() -> Any:
    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: First.
            y: Second.
        """
        return x + y

    return execute


def sums(count: int = 24) -> list[Sample]:
    return [Sample(input=f"{number}+{number}=", target=str(2 * number)) for number in range(count)]


@task
def chain(count: int = 24) -> Task:
    return Task(dataset=sums(count), solver=[system_message("Add."), generate()], scorer=match())


@task
def agent() -> Task:
    tools = [ToolDef(add(), options={"provider": {"key": "x"}}).as_tool()]
    return Task(dataset=sums(), solver=react(prompt="Add.", tools=tools), scorer=includes(), message_limit=8)


@task
def boxed() -> Task:
    return Task(dataset=sums(), scorer=includes(), sandbox="docker")


@scorer(metrics=[mean()])
def asked() -> Any:
    async def score(state: Any, target: Any) -> Score:
        answer = await get_model(role="grader").generate([*state.messages, ChatMessageUser(content="Is it?")])
        return Score(value={"right": float("yes" in answer.completion), "unknown": float("nan")})

    return score


@task
def graded() -> Task:
    return Task(dataset=sums(), solver=generate(), scorer=asked(), time_limit=1, epochs=3)
