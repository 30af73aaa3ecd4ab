"""Conversations of a person with one or two models: both get the same questions, one after another, with the same
seeds."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

from aitrain.engines.hf import HFEngine, HFModel
from aitrain.environment.seeds import derived_seed
from aitrain.environment.session import Message
from aitrain.errors import AitrainError, ConfigError
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.engine import Completion, Decoding, Engine, GenerationRequest, Leave
from aitrain.rollout.episode import sample_turn
from aitrain.rollout.event_loop import EventLoop
from aitrain.rollout.limits import EndOfTurn, Limits
from aitrain.rollout.trajectory import Trajectory
from aitrain.runs.chat_setup import ChatSetup
from aitrain.runs.model_reference import before_training, read_model
from aitrain.training.chat_templates import chat_format
from aitrain.training.model import LoadedPolicy, load_policy
from aitrain.ui.chat_view import ChatView

ANSWER_TOKENS = 512
"""Maximum tokens of an answer, unless the user sets it: a run's limit may be that of short answers."""
NOT_PART = "interrupted: this is not part of the conversation"


class ChatStoppedError(AitrainError):
    """The person has interrupted an answer."""


@dataclass
class ModelChat:
    """One model in a chat, and its messages so far. It is the engine of its own answers, which are shown while they are
    sampled."""

    name: str
    """`base`, `tuned` or `model`."""
    label: str
    """Which model it is."""
    engine: Engine
    chat: ChatFormat
    limits: Limits
    end: EndOfTurn
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context in which the engine has the weights of this model, such as a base without the adapter beside it."""
    has_template: bool = True
    """Whether conversations are rendered by a chat template; if not, the model continues the plain text."""
    messages: list[Message] = field(default_factory=list)
    cut_off: str = ""
    """Why the last answer ends before its end, and what to do; empty if the model ended it."""
    show: Callable[[str], None] = lambda _: None
    """Called with the whole answer so far; it is never shorter than before."""
    is_stopped: Callable[[], bool] = lambda: False
    ids: list[int] = field(default_factory=list)
    """The tokens of the answer so far."""

    @property
    def text(self) -> str:
        """The answer so far, without special tokens."""
        return str(self.chat.tokenizer.decode(self.ids, skip_special_tokens=True))

    def on_tokens(self, tokens: list[int]) -> None:
        """Take the newest token of each row, of which there is one.

        Raises:
            ChatStoppedError: the answer was interrupted.
        """
        self.ids += tokens[:1]
        if self.is_stopped():
            raise ChatStoppedError(NOT_PART)
        self.show(self.text.rstrip("\ufffd"))  # the rest of a character may come with the next token

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion; what was not shown while it was sampled is shown at its end."""
        if self.is_stopped():
            raise ChatStoppedError(NOT_PART)
        begun = request.prompt_ids[len(request.prompt_ids) - request.begun :]
        self.ids = list(begun)
        completion = await self.engine.generate(request)
        self.ids = [*begun, *completion.ids]
        self.show(self.text)
        return completion

    def batch(self, episodes: int) -> AbstractAsyncContextManager[Leave]:
        """The engine's own."""
        return self.engine.batch(episodes)

    async def ask(self, question: str, seed: int, decoding: Decoding) -> str:
        """The model's answer to the person; the conversation is as before if it cannot be had.

        Raises:
            ConfigError: the conversation leaves no room for an answer.
            ChatStoppedError: the answer was interrupted.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        text = "".join(str(message["content"]) for message in asked)
        ids = self.chat.prompt_ids(asked if self.has_template else text)
        room = self.limits.room(len(ids), 0)
        if room < 1:
            what, advice = ("conversation", "Begin a new one: /reset, or reset() in Python.")
            if not any(message["role"] == "assistant" for message in asked):
                what, advice = ("question", f"The model's context has {self.limits.context}.")
            raise ConfigError(f"The {what} has {len(ids)} tokens, which leaves no room for an answer.\n{advice}")
        said = Trajectory(ids)
        async with self.batch(1) as leave:
            await sample_turn(self, self.chat, said, GenerationRequest([], room, decoding=decoding), seed)
            leave()
        self.messages = [*asked, self.chat.read(said.ids, ids, (), self.end.eos_ids)[0]]
        self.cut_off = ""
        if not said.ended_by_policy:
            advice = "--rl-max-new-tokens allows more" if room == self.limits.turn_tokens else "the context is full"
            self.cut_off = f"cut off after {len(said.ids)} tokens: {advice}"
        return self.text


@dataclass
class ChatSession:
    """The conversations of a chat; close it at the end."""

    chats: list[ModelChat]
    seed: int = 0
    decoding: Decoding = Decoding.SEEDED
    system: str = ""
    is_stopped: bool = False
    """Whether Ctrl-C was pressed during the last answer."""
    _loop: EventLoop = field(default_factory=EventLoop)
    _asked: int = 0

    def __post_init__(self) -> None:
        for chat in self.chats:
            chat.is_stopped = lambda: self.is_stopped
        self.reset()

    @property
    def titles(self) -> dict[str, str]:
        """What each model is, by its name."""
        return {chat.name: f"{chat.name}: {chat.label}" for chat in self.chats}

    def reset(self) -> None:
        """Begin new conversations, with the system prompt if there is one."""
        for chat in self.chats:
            chat.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, question: str, view: ChatView | None = None) -> dict[str, str]:
        """The answers by the models' names, shown in a view while they come. Ctrl-C in the main thread ends an answer;
        a second one raises KeyboardInterrupt.

        Raises:
            ConfigError: a conversation leaves no room for an answer.
            ChatStoppedError: the person has interrupted; then the question is part of no conversation.
        """
        before = [chat.messages for chat in self.chats]
        self.is_stopped, answers = False, dict[str, str]()
        self._asked += 1
        seed = derived_seed(self.seed, "chat", self._asked)

        def stop(*_: object) -> None:
            if self.is_stopped:
                raise KeyboardInterrupt
            self.is_stopped = True

        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGINT, stop) if is_main else None
        try:
            for chat in self.chats:
                chat.show = partial(view.answer, chat.name) if view is not None else lambda _: None
                with chat.scope():
                    answers[chat.name] = self._loop.run(chat.ask(question, seed, self.decoding))
        except (ChatStoppedError, ConfigError):
            for chat, messages in zip(self.chats, before, strict=True):
                chat.messages = messages
            raise
        finally:
            if is_main:
                signal.signal(signal.SIGINT, handler)
        return answers

    def close(self) -> None:
        """End its thread."""
        self._loop.close()


def open_session(request: ChatSetup) -> ChatSession:
    """Load the models of a chat: one that was trained, and what it was before the training; with LoRA, they are one set
    of weights.

    Raises:
        ConfigError: a model cannot be loaded, or the base is not known.
    """
    reference = read_model(request.model)
    before = before_training(reference)
    if before is None and request.only == "base":
        raise ConfigError(f"only: it is not known what {reference.given} was trained from")
    label = reference.label if reference.step is None else f"{reference.label}, step {reference.step}"
    tuned = ("model" if before is None else "tuned", label, reference)
    named = [tuned] if before is None else [("base", before.label, before), tuned]
    is_one_model = reference.adapter is not None and before is not None and before.adapter is None
    is_one_model = is_one_model and named[0][2].base == reference.base
    chats, policy = list[ModelChat](), None
    for name, what, each in named:
        if request.only in (None, name) or before is None:
            if policy is None or not is_one_model:
                policy = load_policy(reference if is_one_model else each, request.config)
            scope = policy.model.disable_adapter if is_one_model and name == "base" else nullcontext
            chats.append(_chat_of(name, what, policy, request.answer_tokens, scope))
    decoding = Decoding.GREEDY if request.greedy else Decoding.SEEDED
    return ChatSession(chats, request.seed, decoding, request.system)


def _chat_of(
    name: str,
    label: str,
    policy: LoadedPolicy,
    answer_tokens: int | None,
    scope: Callable[[], AbstractContextManager[object]],
) -> ModelChat:
    answer = max(ANSWER_TOKENS, policy.config.rl_max_new_tokens if policy.config.thinking else 0)
    shown = HFModel(policy.model, policy.tokenizer, on_tokens=lambda tokens: made.on_tokens(tokens))
    engine = HFEngine(shown, policy.sampling, policy.end, policy.context)
    engine.keeps_cache = True  # from one question to the next
    made = ModelChat(
        name,
        label,
        engine,
        chat_format(policy.tokenizer, policy.config),
        Limits(policy.config.rl_max_turns, answer_tokens or answer, None, policy.context),
        policy.end,
        scope,
        policy.tokenizer.chat_template is not None,
    )
    return made
