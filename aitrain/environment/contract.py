"""The contract of an environment: the methods that it may have, and the arguments that each gets.

A method is called by signature: it gets the parameters it names, and no others.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, get_args

from aitrain.errors import EnvironmentFailed, did_you_mean
from aitrain.execution.failure import Failure

_IMMUTABLE = (str, int, float, bool, type(None))


def copied(value: Any, shares_objects: bool = False) -> Any:
    """A copy of a value, also of what its containers hold. Callables (functions, models) and objects that cannot be
    copied (locks, clients, open files) are shared; with `shares_objects`, all that are no containers are."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind in (list, tuple, set, frozenset):
        return kind(copied(item, shares_objects) for item in value)
    if kind is dict:
        return {key: copied(item, shares_objects) for key, item in value.items()}
    if callable(value) or shares_objects:
        return value
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


Prompt = str | list[dict[str, Any]]
"""What a case asks: a string, or chat messages."""

EnvKind = Literal["score_episode", "episode", "start", "rollout"]
ENV_KINDS: tuple[EnvKind, ...] = get_args(EnvKind)
"""Methods that play an episode; an environment has exactly one of them."""

SCORE_ARGUMENTS = ("model", "tokenizer", "completion", "case_idx", "prompt", "case", "messages", "text", "thought")
"""Parameters that `score_episode` may have, beside the columns of the dataset."""

MODEL_ARGUMENTS = ("model", "tokenizer")
"""Arguments that are passed to every call as they are; all others are copied for each call."""

START_ARGUMENTS = ("case_idx", "seed", "prompt", "case")
"""Parameters that `episode` and `start` may have, beside the columns of the dataset."""

GROUP_LISTS = ("completions", "texts", "messages", "scores", "metrics")
"""Arguments of `score_group` with one entry for each answer."""
GROUP_ARGUMENTS = (*GROUP_LISTS, "case_idx", "prompt", "case")
"""Parameters that `score_group` may have, beside the columns of the dataset."""

ARGUMENTS = {
    "score_episode": SCORE_ARGUMENTS,
    "episode": START_ARGUMENTS,
    "start": START_ARGUMENTS,
    "rollout": (*START_ARGUMENTS, "endpoint"),
    "score_group": GROUP_ARGUMENTS,
}


@dataclass(frozen=True)
class Score:
    """A score from 0 to 1 (or in --rl-score-range), or None for unscored, with metrics of the environment's own."""

    score: float | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolResult:
    """What a tool, or `step`, returns if it may end the episode: with `done`, the model is not asked again."""

    content: object
    done: bool = False


@dataclass(frozen=True)
class Case:
    """One row of the dataset.

    `case_idx` is the environment's name for it, not necessarily unique. `number` is unique: the row's index in the
    dataset; the rows of `build_eval_dataset` are numbered after those of the dataset, and those of the next environment
    of a run after both.
    """

    case_idx: Any
    prompt: Prompt
    """Empty messages for a row without a prompt: the environment speaks first."""
    row: Mapping[str, Any]
    number: int = 0
    env: str = ""
    """Name of its environment, in a run with several."""
    first: int = 0
    """Number of the environment's first row."""

    @property
    def own_number(self) -> int:
        """The number that the case has if its environment is the only one."""
        return self.number - self.first

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is chat messages."""
        return not isinstance(self.prompt, str)

    def arguments(self, **more: Any) -> dict[str, Any]:
        """All arguments for `reference` and, with the seed, for `episode` and `start`; a column with one of our names
        is not passed."""
        ours = {"case_idx": self.case_idx, "prompt": self.prompt, "case": dict(self.row)}
        return {**self.row, **ours, **more}


@dataclass(frozen=True)
class Transcript:
    """The conversation of one case, as `score_episode` gets it.

    `content` is a string for a string prompt, else the messages after the prompt: a single one of the assistant if
    there are no tools.
    """

    case: Case
    content: str | list[dict[str, Any]]
    thought: str = ""
    """The thought before the last answer; empty without one, or where it is part of the text."""

    @property
    def text(self) -> str:
        """The last answer as a string, for string and chat prompts."""
        if isinstance(self.content, str):
            return self.content
        own = (message for message in reversed(self.content) if message.get("role") == "assistant")
        return str(next(own, dict[str, Any]()).get("content") or "")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation."""
        said = [{"role": "assistant", "content": self.text}] if isinstance(self.content, str) else self.content
        return [*as_messages(self.case.prompt), *said]

    def arguments(self) -> dict[str, Any]:
        """All arguments for `score_episode` but model and tokenizer; a column with one of our names is not passed."""
        return self.case.arguments(
            completion=self.content, messages=self.messages, text=self.text, thought=self.thought
        )


def as_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """A prompt as messages: one that is a string is a message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def is_message(message: object) -> bool:
    """Whether a chat message has text, parts or tool calls."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), (str, list)) or bool(message.get("tool_calls"))


def with_opening(prompt: Prompt, opening: Sequence[dict[str, Any]]) -> Prompt:
    """The conversation before the first answer: the prompt, and what the environment says first. A text that follows
    a user's text is joined to it, as many chat templates refuse two messages of the user in a row."""
    if isinstance(prompt, str):
        return prompt + "".join(str(message["content"]) for message in opening)
    meeting = [message.get("content") for message in (*prompt[-1:], *opening[:1]) if message["role"] == "user"]
    texts = [content for content in meeting if isinstance(content, str)]
    if len(texts) < 2:
        return [*prompt, *opening]
    return [*prompt[:-1], {**prompt[-1], "content": "\n\n".join(texts)}, *opening[1:]]


def asks_nothing(prompt: Prompt) -> bool:
    """Whether a prompt has no message of the user: it may be complete only after the environment's opening."""
    return not isinstance(prompt, str) and all(message.get("role") != "user" for message in prompt)


def env_kind(environment: object) -> EnvKind:
    """Which of ENV_KINDS the environment has.

    Raises:
        EnvironmentFailed: none of them, or two; or its attributes cannot be found.
    """
    name = type(environment).__name__
    if not hasattr(environment, "__dict__"):
        raise EnvironmentFailed(
            f"{name} has __slots__ and no __dict__: what build_dataset sets would not reach other processes,\n"
            "and episodes would get no copy of it. Remove __slots__, or `slots=True` of a dataclass."
        )
    found = [kind for kind in ENV_KINDS if callable(getattr(environment, kind, None))]
    if not found:
        raise EnvironmentFailed(
            f"{name} has no score_episode: give it one that returns a score from 0 to 1\n"
            "(or, for several turns, `episode`, `start` or `rollout`, see docs/environments.md)"
        )
    if len(found) > 1:
        raise EnvironmentFailed(f"{name} has both {found[0]} and {found[1]}: remove one of them")
    return found[0]


def check_contract(environment: Any, columns: set[str]) -> None:
    """Check the parameters of the environment's methods; `columns` are those that every row of its dataset has.

    Raises:
        EnvironmentFailed: a method has a required parameter that is neither known nor a column.
    """
    for method in (env_kind(environment), *["score_group"] * scores_groups(environment)):
        known = {*ARGUMENTS[method], *columns}
        for parameter in inspect.signature(getattr(environment, method)).parameters.values():
            is_optional = parameter.default is not parameter.empty or parameter.kind.name.startswith("VAR")
            if not is_optional and (parameter.name not in known or parameter.kind is parameter.POSITIONAL_ONLY):
                others = ", ".join(sorted(columns - {"prompt"})) or "none but prompt"
                raise EnvironmentFailed(
                    f"{type(environment).__name__}.{method} has a parameter that is unknown, or taken by position"
                    f" only: {parameter.name}.{did_you_mean(parameter.name, known - {parameter.name})}\n"
                    f"It may have: {', '.join(ARGUMENTS[method])}\nand the columns that every row has: {others}"
                )


def scores_groups(environment: object) -> bool:
    """Whether the environment scores the episodes of a group together."""
    return callable(getattr(environment, "score_group", None))


def call_by_name(method: Callable[..., Any], arguments: Mapping[str, Any], shared: Collection[str] = ()) -> Any:
    """What a method returns, also one that is `async def`, for the arguments that it names; those not in `shared` are
    copied."""
    named = arguments_for(method, arguments)
    return _awaited(method(**{name: named[name] if name in shared else copied(named[name]) for name in named}))


def arguments_for(method: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments whose names are parameters of the method; all of them if it takes `**kwargs`."""
    names = named_by(method)
    return dict(arguments) if names is None else {name: arguments[name] for name in names if name in arguments}


def named_by(method: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of a method's parameters; None if it takes `**kwargs`."""
    function = getattr(method, "__func__", method)  # of a bound method, which is another object at each access
    names = (_names_of if inspect.isfunction(function) else _names_of.__wrapped__)(function)
    return names[1:] if names and inspect.ismethod(method) else names


@lru_cache
def _names_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_all else tuple(parameters)


def call_with_tokenizer(method: Callable[..., Any], tokenizer: object) -> Any:
    """Call `build_dataset` or `build_eval_dataset`, with the tokenizer as first argument if it takes one."""
    for first in list(inspect.signature(method).parameters.values())[:1]:
        # a parameter with another default, such as `limit=100`, is not for the tokenizer
        is_open = first.default is first.empty or first.default is None or first.name == "tokenizer"
        if is_open and first.kind not in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
            return _awaited(method(tokenizer))
    return call_by_name(method, {"tokenizer": tokenizer}, MODEL_ARGUMENTS)


def _awaited(value: Any) -> Any:
    from aitrain.execution.async_calls import run_if_async  # here, as no light command needs asyncio

    return run_if_async(value)


Bounds = tuple[float, float]
"""The lowest and the highest score that a run allows (`--rl-score-range`)."""

UNIT: Bounds = (0.0, 1.0)
LARGEST_SCORE = 1e18
"""With larger ones, positive or negative, the float32 variance of a group's scores would overflow."""
LARGEST_METRIC = 1e300
"""With larger ones, a mean of metrics would overflow."""
ROUNDING = 1e-9
"""What a score may be outside of its range and counts as the bound: weighted parts may add up to 1.0000000000000002."""


@dataclass(frozen=True)
class ScoreResult:
    """The score of one episode; None if the environment returned None or failed."""

    score: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    is_unfinished: bool = False
    """Whether a limit ended the episode, for which the environment has no score."""

    def in_range(self, bounds: Bounds = UNIT) -> ScoreResult:
        """The result in a run that allows these scores: one outside of them is a failure, and that of an unfinished
        episode is 0, or the lowest of a range without 0."""
        low, high = (min(max(bound, -LARGEST_SCORE), LARGEST_SCORE) for bound in bounds)
        if self.is_unfinished:
            return ScoreResult(0.0 if low <= 0.0 <= high else low)
        if self.score is None:
            return self
        nearest = min(max(self.score, low), high)
        if math.isclose(self.score, nearest, rel_tol=ROUNDING, abs_tol=ROUNDING):
            return replace(self, score=nearest)
        why = f"which is not from {low:g} to {high:g}"
        why += "" if math.isinf(bounds[0]) else " (--rl-score-range LOW,HIGH or any)"
        return ScoreResult(None, failure=Failure("out_of_range", f"returned {self.score:g}, {why}"))


UNFINISHED = ScoreResult(None, is_unfinished=True)


def parse_score(returned: Any) -> ScoreResult:
    """The score of what an environment returned: a number, a Score, a dict with `score`, or None; in any range."""
    value, metrics = returned, dict[str, Any]()
    if isinstance(returned, Score):
        value, metrics = returned.score, returned.metrics
    elif isinstance(returned, Mapping) and "score" in returned:
        value, nested = returned["score"], returned.get("metrics")
        metrics = {**returned, **nested} if isinstance(nested, Mapping) else {**returned}
        del metrics["score"]
    numbers = [(str(name), _number(metric)) for name, metric in metrics.items()]
    finite = {name: number for name, number in numbers if number is not None and abs(number) <= LARGEST_METRIC}
    number = _number(value)
    if number is None and value is not None:
        what = f'returned {shown(returned)}, which is neither a number nor a dict with a number as "score"'
        return ScoreResult(None, failure=Failure("wrong_type", what))
    if number is not None and not math.isfinite(number):
        return ScoreResult(None, failure=Failure("not_finite", f"returned {number}, not a finite number"))
    return ScoreResult(number, finite)


def _number(value: Any) -> float | None:
    """A float, int, bool, numpy or torch scalar as a float; None for anything else, strings included."""
    try:
        item = value.item() if hasattr(value, "item") else value
        return float(item) if isinstance(item, (int, float)) else None
    except (ValueError, RuntimeError, TypeError):  # an array of several numbers, or of none
        return None
    except OverflowError:
        return math.inf


def shown(value: object) -> str:
    """The value and its type, short enough for a message."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
