"""A chat with one or two models: the same questions and cases to each, one after another, with the same seeds."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from aitrain.environment.contract import Case, env_kind
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.environment.seeds import derived_seed
from aitrain.environment.session import Message
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.jobs.chat_models import LoadedChat, load_chats
from aitrain.options.train import TrainConfig
from aitrain.rollout.engine import Decoding
from aitrain.rollout.episode import Episode
from aitrain.rollout.event_loop import EventLoop
from aitrain.rollout.limits import Limits
from aitrain.rollout.model_chat import NOT_PART, CaseSeeds, ChatStoppedError
from aitrain.runs.chat_setup import ChatSetup
from aitrain.runs.model_reference import read_model
from aitrain.training.dataset import check_chat_template
from aitrain.training.episode_format import format_of_episodes, tools_shown
from aitrain.workbench.opening import OpenedEnvironment, open_environment
from aitrain.workbench.play import chosen_case


class Listener(Protocol):
    """Gets what is said, as it is said; `name` is the model in whose conversation that is."""

    def answer(self, name: str, text: str) -> None:
        """The text so far of the model's present answer."""

    def said(self, name: str, messages: Sequence[Message]) -> None:
        """The environment's messages after an answer."""


class Silent:
    """Shows nothing while the answers come."""

    def answer(self, name: str, text: str) -> None:
        """No-op."""

    def said(self, name: str, messages: Sequence[Message]) -> None:
        """No-op."""


class StopFlag:
    """Whether Ctrl-C was pressed during an answer; pressed again, it raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.is_set = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which Ctrl-C sets the flag; only the main thread gets it."""
        self.is_set = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_signal(self, _: int, __: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@dataclass
class ChatSession:
    """The conversations of a chat; close it at the end."""

    loaded: list[LoadedChat]
    config: TrainConfig
    """The options of cases."""
    seed: int = 0
    decoding: Decoding = Decoding.SEEDED
    system: str = ""
    environment: object = None
    """The environment of cases; None: the options name it."""
    stop: StopFlag = field(default_factory=StopFlag)
    _loop: EventLoop = field(default_factory=EventLoop)
    _asked: int = 0
    _opened: OpenedEnvironment | None = None
    _runner: EnvRunner | None = None

    def __post_init__(self) -> None:
        self.reset()

    @property
    def titles(self) -> dict[str, str]:
        """What each model is, by its name."""
        return {one.chat.name: f"{one.chat.name}: {one.chat.label}" for one in self.loaded}

    def reset(self) -> None:
        """Begin new conversations, with the system prompt if there is one."""
        for chat, _ in self.loaded:
            chat.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, question: str, listener: Listener) -> dict[str, str]:
        """The answers by the models' names.

        Raises:
            ConfigError: a conversation leaves no room for an answer.
            ChatStoppedError: the person has interrupted; then the question is part of no conversation.
        """
        seed = self._next_seed()
        with self._taken_back_if_stopped():
            answers = {}
            for one in self.loaded:
                with self._heard(one, listener), one.chat.scope():
                    answers[one.chat.name] = self._loop.run(one.chat.ask(question, seed, self.decoding))
            return answers

    def case(self, wanted: str) -> Case:
        """The case of the environment with this number, or this name.

        Raises:
            AitrainError: there is none, or the environment cannot be loaded.
        """
        if self._opened is None:
            tokenizer = self.loaded[0].policy.tokenizer
            self._opened, self.config = open_environment(self.config, tokenizer, self.environment)
        return chosen_case(self._opened.all_cases, wanted)

    def play(self, case: Case, listener: Listener) -> dict[str, Episode]:
        """The episodes of a case, played as in training, by the models' names; the conversations are then theirs.

        Raises:
            AitrainError: a model cannot play the environment.
            ChatStoppedError: the person has interrupted.
        """
        seeds = CaseSeeds(self.seed, self._next_seed(), self.decoding)
        with self._taken_back_if_stopped():
            return {one.chat.name: self._played(one, case, seeds, listener) for one in self.loaded}

    def close(self) -> None:
        """Close the environment, and end its threads."""
        if self._runner is not None:
            self._runner.close()
        self._loop.close()

    def _played(self, one: LoadedChat, case: Case, seeds: CaseSeeds, listener: Listener) -> Episode:
        assert self._opened is not None  # there is a case
        environment, chat, config = self._opened.environment, one.chat, self.config
        is_chat = case.is_chat or env_kind(environment) == "rollout"
        check_chat_template(is_chat, one.policy.tokenizer)
        tools = tools_shown(environment, chat.chat, is_chat, lambda _: None)
        chat_format = format_of_episodes(environment, chat.chat, tools, is_chat, lambda _: None)
        limits = Limits(
            config.rl_max_turns, config.rl_max_new_tokens, config.rl_max_episode_tokens, chat.limits.context
        )
        if self._runner is None:
            self._runner = start_runner(environment, config)
        self._runner.offer(one.policy.model, one.policy.tokenizer)
        self._runner.on_messages = lambda _, messages: listener.said(chat.name, messages)
        with self._heard(one, listener), chat.scope():
            return self._loop.run(chat.play(self._runner, chat_format, limits, case, seeds))

    def _next_seed(self) -> int:
        self._asked += 1
        return derived_seed(self.seed, "chat", self._asked)

    @contextmanager
    def _heard(self, one: LoadedChat, listener: Listener) -> Iterator[None]:
        answer = one.chat.engine.answer
        answer.show, answer.is_stopped = (lambda text: listener.answer(one.chat.name, text)), lambda: self.stop.is_set
        if self.stop.is_set:
            raise ChatStoppedError(NOT_PART)
        yield

    @contextmanager
    def _taken_back_if_stopped(self) -> Iterator[None]:
        before = [list(one.chat.messages) for one in self.loaded]
        try:
            with self.stop.listening():
                yield
        except (ChatStoppedError, ConfigError):
            for one, messages in zip(self.loaded, before, strict=True):
                one.chat.messages = messages
            raise


def open_session(request: ChatSetup, environment: object = None) -> ChatSession:
    """Load the models of a chat; the options name the environment of its cases, unless an object is given.

    Raises:
        ConfigError: a model cannot be loaded.
    """
    config = request.config
    loaded = load_chats(read_model(request.model), config, request.only, request.answer_tokens)
    decoding = Decoding.GREEDY if request.greedy else Decoding.SEEDED
    return ChatSession(loaded, config, request.seed, decoding, request.system, environment)


def answers_and_scores(episodes: Mapping[str, Episode]) -> tuple[dict[str, str], dict[str, float | None]]:
    """The last answers in episodes and their scores, by the models' names.

    Raises:
        EnvironmentFailed: the environment failed in one of them.
    """
    for message in (episode.failure_message for episode in episodes.values()):
        if message:
            raise EnvironmentFailed(message)
    answers = {name: _last_answer(episode) for name, episode in episodes.items()}
    return answers, {name: episode.result.score for name, episode in episodes.items()}


def _last_answer(episode: Episode) -> str:
    said = (message for message in reversed(episode.messages) if message["role"] == "assistant")
    return str(next(said, {}).get("content", ""))
