"""What an environment is: the methods it may have, and what each of them is given.

A method is called by signature: it gets the parameters it names, and no others.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aitrain.errors import EnvironmentFailed, did_you_mean

if TYPE_CHECKING:
    import asyncio

Prompt = str | list[dict[str, Any]]
"""What a case asks: a string, or chat messages."""

SCORE_WORDS = ("model", "tokenizer", "completion", "case_idx", "prompt", "case", "messages", "text")
"""What `score_episode` may ask for by name, beside the columns of the dataset."""


@dataclass(frozen=True)
class Score:
    """A score from 0 to 1, or None for unscored, with metrics of the environment's own."""

    score: float | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row of the dataset, with the number that the environment knows it by."""

    case_idx: Any
    prompt: Prompt
    row: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is chat messages."""
        return not isinstance(self.prompt, str)


@dataclass(frozen=True)
class Completion:
    """The model's answer to a case, as the environment is shown it.

    `content` is a string for string prompts, and one assistant message in a list for chat prompts, as TRL has it.
    """

    case: Case
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """The answer as a string, whatever the prompt is."""
        return self.content if isinstance(self.content, str) else str(self.content[-1].get("content") or "")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation."""
        if isinstance(self.case.prompt, str) or isinstance(self.content, str):
            return [
                {"role": "user", "content": self.case.prompt},
                {"role": "assistant", "content": self.text},
            ]
        return [*self.case.prompt, *self.content]

    def words(self) -> dict[str, Any]:
        """Everything of it that `score_episode` may ask for; our words win over a column of the same name."""
        return {
            **self.case.row,
            "completion": self.content,
            "case_idx": self.case.case_idx,
            "prompt": self.case.prompt,
            "case": dict(self.case.row),
            "messages": self.messages,
            "text": self.text,
        }


_METHODS = {
    "build_dataset": "one that returns rows with a prompt",
    "score_episode": "one that returns a score from 0 to 1",
}


def check_methods(environment: object) -> None:
    """Refuse an environment that lacks a method; this needs neither a dataset nor a model.

    Raises:
        EnvironmentFailed: it does.
    """
    for name, what in _METHODS.items():
        if not callable(getattr(environment, name, None)):
            raise EnvironmentFailed(f"{type(environment).__name__} has no {name}: give it {what}")


def check_contract(environment: Any, columns: Iterable[str]) -> None:
    """Refuse what cannot be trained on, knowing the columns that every row of its dataset has.

    Raises:
        EnvironmentFailed: a method is missing, or asks for something that there is not.
    """
    check_methods(environment)
    place, columns = f"{type(environment).__name__}.score_episode", set(columns)
    known = {*SCORE_WORDS, *columns}
    for parameter in _required(environment.score_episode):
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise EnvironmentFailed(
                f"{place} takes {parameter.name} by position only, and is called by name: remove the `/`"
            )
        if parameter.name not in known:
            raise EnvironmentFailed(
                f"{place} asks for {parameter.name}, which is not known.{did_you_mean(parameter.name, known)}\n"
                f"It may ask for: {', '.join(SCORE_WORDS)}\n"
                f"and the columns that every row has: {', '.join(sorted(columns - {'prompt'})) or 'none but prompt'}"
            )


def _required(method: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that a call must give."""
    parameters = inspect.signature(method).parameters.values()
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.default is p.empty]


def arguments_for(method: Callable[..., Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """Of all the words, those that the method names; all of them when it takes `**kwargs`."""
    return chosen(named_by(method), words)


def named_by(method: Callable[..., Any]) -> tuple[str, ...] | None:
    """The parameters that a method names; None: it takes all there are."""
    parameters = inspect.signature(method).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_all else tuple(parameters)


def chosen(names: tuple[str, ...] | None, words: Mapping[str, Any]) -> dict[str, Any]:
    """Of all the words, those with these names."""
    return dict(words) if names is None else {name: words[name] for name in names if name in words}


def call_with_tokenizer(method: Callable[..., Any], tokenizer: object) -> Any:
    """`build_dataset` and its kin: the tokenizer by position, whatever the parameter is called, or nothing."""
    parameters = inspect.signature(method).parameters
    if any(_is_for_tokenizer(parameter) for parameter in list(parameters.values())[:1]):
        return finished(method(tokenizer))
    return finished(method(**arguments_for(method, {"tokenizer": tokenizer})))


def _is_for_tokenizer(first: inspect.Parameter) -> bool:
    """Not one with a default of its own kind: `limit=100` is no tokenizer."""
    is_open = first.default is first.empty or first.default is None or first.name == "tokenizer"
    return is_open and first.kind not in (first.KEYWORD_ONLY, first.VAR_KEYWORD)


def finished(value: Any) -> Any:
    """The value itself, or what it comes to when the method was `async def`."""
    return run_async(value) if inspect.isawaitable(value) else value


def run_async(awaitable: Awaitable[Any]) -> Any:
    """Wait for it on the one loop that all async methods of the environment share (a client opened in one of them
    stays usable in the next), also where the caller's own thread runs a loop, as in a notebook."""

    import asyncio  # here, because the command line never needs it

    async def wait() -> Any:
        return await awaitable

    return asyncio.run_coroutine_threadsafe(wait(), _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environment-loop", daemon=True).start()
    return loop
