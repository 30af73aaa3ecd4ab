"""What an environment is: the methods it may have, and what each of them is given.

A method is called by signature: it gets the parameters it names, and no others.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aitrain.errors import EnvironmentFailed, did_you_mean

if TYPE_CHECKING:
    import asyncio

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
    for parameter in _required(getattr(environment, level)):
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


class Job:
    """A call into the environment that has a deadline (those of workers.py are the only ones)."""

    waits: tuple[Callable[[Any], object], object] | None = None
    """What the call waits for just now outside its thread: see `ended_by`."""

    def settle(self) -> None:
        """Wait while somebody is just deciding whether to give the call up."""


current_job: ContextVar[Job | None] = ContextVar("current_job", default=None)
"""The job that the calling code is part of: asyncio hands it on to the coroutines that a job waits for."""


@contextmanager
def ended_by(end: Callable[[Any], object], awaited: object) -> Iterator[None]:
    """The calling job waits here for something outside its thread: at its deadline, `end` is called with the Failure.

    `awaited` is an awaitable, or a function that returns the stack that it hangs at."""
    job = current_job.get()
    if job is None:
        yield
        return
    before, job.waits = job.waits, (end, awaited)
    try:
        job.settle()
        yield
    finally:
        job.waits = before


def run_async(awaitable: Awaitable[Any]) -> Any:
    """Wait for it on the one loop that all async methods of the environment share (a client opened in one of them
    stays usable in the next), also where the caller's own thread runs a loop, as in a notebook."""

    import asyncio  # here, because the command line never needs it
    import concurrent.futures

    async def wait() -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        except asyncio.CancelledError as error:  # the user's own, unless this task was cancelled
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None, error

    with _one_at_a_time:
        loop = _loop()
    future = asyncio.run_coroutine_threadsafe(wait(), loop)
    try:
        with ended_by(lambda _: future.cancel(), awaitable):
            value, cancelled = future.result()
    except concurrent.futures.CancelledError:
        _forget_if_blocked(loop)
        raise
    if cancelled is not None:
        raise cancelled
    return value


def _forget_if_blocked(loop: asyncio.AbstractEventLoop) -> None:
    """An `async def` that never yields blocks what shares its loop; later calls get a new one."""
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    if not answered.wait(1.0):
        with _one_at_a_time:
            if _loop() is loop:
                _loop.cache_clear()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=_run_for_ever, args=(loop,), name="environment-loop", daemon=True).start()
    return loop


def _run_for_ever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            return loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            pass  # whoever waits for the task gets it: asyncio lets these two end the loop as well


_one_at_a_time = threading.Lock()


def _forget_loop() -> None:
    """The thread that ran it, or that held the lock, is not there in a forked process."""
    global _one_at_a_time
    _one_at_a_time = threading.Lock()
    _loop.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_loop)
