"""Tasks of Inspect, one of each kind that the adapter has to run."""

from __future__ import annotations

from typing import Any

from inspect_ai import Task, task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, get_model
from inspect_ai.scorer import Score, Target, includes, match, mean, scorer
from inspect_ai.solver import (
    Generate,
    TaskState,
    generate,
    self_critique,
    solver,
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


@scorer(metrics=[mean()])
def shortness() -> Any:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value={"short": 1 / (1 + len(state.output.completion)), "polite": "P"})

    return score


@solver
def simulated_user() -> Any:
    """A user who speaks first, and answers once: a conversation of its own."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        for _ in range(2):
            said = await get_model(role="user").generate("You are the user.")
            state.messages.append(ChatMessageUser(content=said.completion or "..."))
            state = await generate(state)
        return state

    return solve


@solver
def rewriter() -> Any:
    """Changes what was said before."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        state = await generate(state)
        state.messages[-1].content = "something else"
        state.messages.append(ChatMessageUser(content="And?"))
        return await generate(state)

    return solve


def sums(count: int = 24) -> list[Sample]:
    return [Sample(input=f"{number}+{number}=", target=str(2 * number)) for number in range(count)]


@task
def chain(count: int = 24) -> Task:
    return Task(dataset=sums(count), solver=[system_message("Add."), generate()], scorer=match())


@task
def agent() -> Task:
    return Task(dataset=sums(), solver=react(prompt="Add.", tools=[add()]), scorer=includes(), message_limit=8)


@task
def critique() -> Task:
    return Task(dataset=sums(), solver=[generate(), self_critique()], scorer=[match(), shortness()])


@task
def dialogue() -> Task:
    return Task(dataset=sums(), solver=simulated_user(), scorer=includes())


@task
def rewritten() -> Task:
    return Task(dataset=sums(), solver=rewriter(), scorer=includes())


@task
def boxed() -> Task:
    return Task(dataset=sums(), scorer=includes(), sandbox="docker")
