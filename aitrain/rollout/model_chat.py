"""A conversation of a person with one model, on any engine, and cases of an environment that the model plays in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from aitrain.environment.contract import Case, Prompt
from aitrain.environment.seeds import SampleSeed
from aitrain.environment.session import Message
from aitrain.errors import AitrainError, ConfigError
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.engine import Completion, Decoding, Engine, GenerationRequest, Leave
from aitrain.rollout.episode import Episode, Rollout
from aitrain.rollout.limits import EndOfTurn, Limits

NOT_PART = "interrupted: this is not part of the conversation"


class ChatStoppedError(AitrainError):
    """The person has interrupted an answer."""


@dataclass
class AnswerText:
    """The text of an answer while its tokens are sampled; one that is shown is never shorter than the one before."""

    chat: ChatFormat
    show: Callable[[str], None] = lambda _: None
    """Called with the whole text so far after each token."""
    is_stopped: Callable[[], bool] = lambda: False
    ids: list[int] = field(default_factory=list)

    def on_tokens(self, tokens: list[int]) -> None:
        """Take the newest token of each row, of which there is one.

        Raises:
            ChatStoppedError: the answer was interrupted.
        """
        self.ids += tokens[:1]
        if self.is_stopped():
            raise ChatStoppedError(NOT_PART)
        self.show(self.text.rstrip("\ufffd"))  # the rest of a character may come with the next token

    @property
    def text(self) -> str:
        """The tokens as text, without special ones."""
        return str(self.chat.tokenizer.decode(self.ids, skip_special_tokens=True))


@dataclass(frozen=True)
class ShownEngine:
    """An engine whose completions are shown by an AnswerText."""

    engine: Engine
    answer: AnswerText

    async def generate(self, request: GenerationRequest) -> Completion:
        """Sample one completion; what was not shown while it was sampled is shown at its end."""
        self.answer.ids = []
        completion = await self.engine.generate(request)
        self.answer.ids = list(completion.ids)
        self.answer.show(self.answer.text)
        return completion

    def batch(self, episodes: int) -> AbstractAsyncContextManager[Leave]:
        """The engine's own."""
        return self.engine.batch(episodes)


@dataclass
class ModelChat:
    """One model in a chat: its messages so far, and what samples its answers."""

    name: str
    """`base` or `tuned`."""
    label: str
    """Which model it is."""
    engine: ShownEngine
    chat: ChatFormat
    limits: Limits
    end: EndOfTurn
    has_template: bool = True
    """Whether conversations are rendered by a chat template; if not, the model continues the plain text."""
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context in which the engine has the weights of this model, such as a base without the adapter beside it."""
    messages: list[Message] = field(default_factory=list)
    cut_off: str = ""
    """Why the last answer to the person ends before its end, and what to do; empty if the model ended it."""

    @property
    def prompt(self) -> Prompt:
        """What the model gets: the messages, or their plain text."""
        return self.messages if self.has_template else "".join(str(message["content"]) for message in self.messages)

    async def ask(self, question: str, seed: int, decoding: Decoding) -> str:
        """The model's answer to the person; the conversation is as before if it cannot be had.

        Raises:
            ConfigError: the conversation leaves no room for an answer.
            ChatStoppedError: the answer was interrupted.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": question})
        try:
            ids = self.chat.prompt_ids(self.prompt)
            room = self.limits.room(len(ids), 0)
            if room < 1:
                what, advice = ("conversation", "Begin a new one: /reset, or reset() in Python.")
                if not any(message["role"] == "assistant" for message in before):
                    what, advice = ("question", f"The model's context has {self.limits.context}.")
                raise ConfigError(f"The {what} has {len(ids)} tokens, which leaves no room for an answer.\n{advice}")
            async with self.engine.batch(1) as leave:
                completion = await self.engine.generate(GenerationRequest(ids, room, SampleSeed(seed), decoding))
                leave()
        except BaseException:
            self.messages = before
            raise
        self.messages.append(self.chat.read(completion.ids, ids, (), self.end.eos_ids)[0])
        self.cut_off = ""
        if completion.finish_reason == "length":
            advice = "--rl-max-new-tokens allows more" if room == self.limits.turn_tokens else "the context is full"
            self.cut_off = f"cut off after {len(completion.ids)} tokens: {advice}"
        return self.engine.answer.text

    async def play(self, rollout: Rollout, case: Case, env_seed: int, seed: int, decoding: Decoding) -> Episode:
        """Play a case as in training, on the engine; the conversation is then that of the episode.

        Raises:
            ChatStoppedError: an answer was interrupted.
        """
        (episode,) = await rollout.play([case], [env_seed], [seed], decoding)
        if episode.messages:
            self.messages = list(episode.conversation)
        return episode
