"""The contract of an environment: the methods that it may have, and the arguments that each gets.

A method is called by signature: it gets the parameters it names, and no others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aitrain.errors import EnvironmentFailed, did_you_mean
from aitrain.execution.async_calls import run_if_async

Prompt = str | list[dict[str, Any]]
"""What a case asks: a string, or chat messages."""

LEVELS = ("score_episode", "episode", "start")
"""What plays an episode with the model: an environment has one of them."""

SCORE_WORDS = ("model", "tokenizer", "completion", "case_idx", "prompt", "case", "messages", "text")
"""What `score_episode` may ask for by name, beside the columns of the dataset."""

MODEL_WORDS = ("model", "tokenizer")
"""Of those, what belongs to the policy: every call is given the object itself, and of everything else a copy."""

START_WORDS = ("case_idx", "seed", "prompt", "case")
"""What `episode` and `start` may ask for by name, beside the columns of the dataset."""


@dataclass(frozen=True)
class Score:
    """A score from 0 to 1 (or in --rl-score-range), or None for unscored, with metrics of the environment's own."""

    score: float | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One row of the dataset. `case_idx` is what the environment knows it by, which several rows may have in common;
    `number` is the row's own: its place in the dataset, where held-out rows are numbered on from the last one."""

    case_idx: Any
    prompt: Prompt
    row: Mapping[str, Any]
    number: int = 0

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is chat messages."""
        return not isinstance(self.prompt, str)

    def words(self, seed: int) -> dict[str, Any]:
        """Everything that `episode` and `start` may ask for; our words win over a column of the same name."""
        ours = {"case_idx": self.case_idx, "seed": seed, "prompt": self.prompt, "case": dict(self.row)}
        return {**self.row, **ours}


@dataclass(frozen=True)
class Transcript:
    """The model's answers to a case, as the environment is shown them.

    `content` is a string for string prompts; for chat prompts it is the messages after the prompt, which is one of the
    assistant's where there are no tools.
    """

    case: Case
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """The last answer as a string, whatever the prompt is."""
        if isinstance(self.content, str):
            return self.content
        own = [message for message in self.content if message.get("role") == "assistant"]
        return str(own[-1].get("content") or "") if own else ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation."""
        if isinstance(self.case.prompt, str) or isinstance(self.content, str):
            return [{"role": "user", "content": self.case.prompt}, {"role": "assistant", "content": self.text}]
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


def level_of(environment: object) -> str:
    """Which of LEVELS the environment has.

    Raises:
        EnvironmentFailed: none of them, or two.
    """
    name = type(environment).__name__
    found = [level for level in LEVELS if callable(getattr(environment, level, None))]
    if not found:
        raise EnvironmentFailed(
            f"{name} has no score_episode: give it one that returns a score from 0 to 1\n"
            "(or, for several turns, `episode` or `start`, see docs/environments.md)"
        )
    if len(found) > 1:
        raise EnvironmentFailed(f"{name} has both {found[0]} and {found[1]}: which of them plays? Remove one.")
    return found[0]


def check_methods(environment: object) -> None:
    """Refuse an environment that lacks a method; this needs neither a dataset nor a model.

    Raises:
        EnvironmentFailed: it does, or has one that cannot be played with.
    """
    if not callable(getattr(environment, "build_dataset", None)):
        raise EnvironmentFailed(
            f"{type(environment).__name__} has no build_dataset: give it one that returns rows with a prompt"
        )
    level = level_of(environment)
    method = getattr(environment, level)
    if level == "episode" and (inspect.isasyncgenfunction(method) or inspect.iscoroutinefunction(method)):
        raise EnvironmentFailed(
            f"{type(environment).__name__}.episode is async, and Python lets no async generator return a score\n"
            "Write it with `def`, or use `start`, whose methods may be async."
        )


def check_contract(environment: Any, columns: Iterable[str]) -> None:
    """Refuse what cannot be trained on, knowing the columns that every row of its dataset has.

    Raises:
        EnvironmentFailed: a method is missing, or asks for something that there is not.
    """
    check_methods(environment)
    level = level_of(environment)
    words = SCORE_WORDS if level == "score_episode" else START_WORDS
    place, columns = f"{type(environment).__name__}.{level}", set(columns)
    known = {*words, *columns}
    for parameter in inspect.signature(getattr(environment, level)).parameters.values():
        takes_rest = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if takes_rest or parameter.default is not parameter.empty:
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise EnvironmentFailed(
                f"{place} takes {parameter.name} by position only, and is called by name: remove the `/`"
            )
        if parameter.name not in known:
            raise EnvironmentFailed(
                f"{place} asks for {parameter.name}, which is not known.{did_you_mean(parameter.name, known)}\n"
                f"It may ask for: {', '.join(words)}\n"
                f"and the columns that every row has: {', '.join(sorted(columns - {'prompt'})) or 'none but prompt'}"
            )


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
    for first in list(inspect.signature(method).parameters.values())[:1]:
        # `limit=100`, with a default of its own kind, is no tokenizer
        is_open = first.default is first.empty or first.default is None or first.name == "tokenizer"
        if is_open and first.kind not in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
            return run_if_async(method(tokenizer))
    return run_if_async(method(**arguments_for(method, {"tokenizer": tokenizer})))
