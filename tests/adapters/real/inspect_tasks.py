"""Tasks of Inspect, one of each kind that the adapter has to run."""

from __future__ import annotations

from typing import Any

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes, match
from inspect_ai.solver import (
    generate,
    system_message,
)
from inspect_ai.tool import tool


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
    return Task(dataset=sums(), solver=react(prompt="Add.", tools=[add()]), scorer=includes(), message_limit=8)


@task
def boxed() -> Task:
    return Task(dataset=sums(), scorer=includes(), sandbox="docker")
