"""Plays episodes whose replies are written and not sampled, by a script, a person or a record: the policy is an engine,
and the loop is that of a training."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aitrain.environment.contract import Case, Prompt, ScoreResult, call_reference
from aitrain.environment.runner import EnvRunner, score_groups, start_runner
from aitrain.environment.session import AssistantTurn, Group, GroupMember, Message, ResetResult
from aitrain.environment.tool_call_parser import read_calls
from aitrain.execution.failure import Failure
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat, ParsedTurn, Schemas
from aitrain.rollout.engine import Completion, GenerationRequest, Leave, OutOfRepliesError
from aitrain.rollout.episode import Rollout
from aitrain.rollout.event_loop import EventLoop
from aitrain.rollout.limits import EndOfTurn, Limits

JUNK_TEXT = "qwzx jjkp 0x1f ~~ lorem vv"
"""An answer without meaning: no words of a task, no number, no format."""


# -- policies


@dataclass(frozen=True)
class Conversation:
    """What a policy sees before its next reply: all messages, and how many of them are its own."""

    messages: list[Message]
    answers: int


Policy = Callable[[Conversation], str | ParsedTurn | None]
"""Gives the next reply in a conversation; None if it has none left, which ends the episode like a limit."""


@dataclass(frozen=True)
class Script:
    """A policy that gives these replies in this order."""

    replies: tuple[str, ...]

    def ending_in(self, reply: str) -> Script:
        """The same replies, with another last one."""
        return Script((*self.replies[:-1], reply))

    def __call__(self, said: Conversation) -> str | None:
        """The next reply."""
        return self.replies[said.answers] if said.answers < len(self.replies) else None


@dataclass(frozen=True)
class Constant:
    """A policy that gives the same reply in every turn."""

    text: str

    def __call__(self, said: Conversation) -> str:
        """The reply."""
        return self.text


_REVEALED = re.compile(r"(?i)(?:answer|solution|word|number|result)\W+(?:was|is)\W+([^\s.,;!]+)")


@dataclass(frozen=True)
class Parrot:
    """A policy that repeats what the environment said last, or only the answer that it gives away there."""

    only_answer: bool = False

    def __call__(self, said: Conversation) -> str:
        """The repetition."""
        heard = (message for message in reversed(said.messages) if message["role"] != "assistant")
        text = str(next(heard, {}).get("content") or "")
        revealed = _REVEALED.search(text) if self.only_answer else None
        return revealed[1] if revealed else text


EMPTY, JUNK = Constant(""), Constant(JUNK_TEXT)


def reference_of(environment: Any, case: Case) -> Script | None:
    """The replies that `environment.reference` returns; None if it has no such method, or returns None.

    Raises:
        Exception: what the environment's method raises.
    """
    found = call_reference(environment, case) if callable(getattr(environment, "reference", None)) else None
    if found is None:
        return None
    return Script(tuple(map(str, found)) if isinstance(found, (list, tuple)) else (str(found),))


# -- the engine of written replies


def as_messages(prompt: Prompt) -> list[Message]:
    """A prompt as messages: one that is a string is a message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


@dataclass(frozen=True)
class MessageFormat(ChatFormat):
    """A chat format in which each message and each reply is one token."""

    tokenizer: Any = None
    vocabulary: list[Message | str | ParsedTurn] = field(default_factory=list)

    def token(self, entry: Message | str | ParsedTurn) -> int:
        """A new token."""
        self.vocabulary.append(entry)
        return len(self.vocabulary) - 1

    def conversation(self, ids: Sequence[int]) -> Conversation:
        """What the tokens stand for."""
        said: list[Any] = [self.vocabulary[token] for token in ids]
        messages = [one[0] if isinstance(one, tuple) else one for one in said]
        return Conversation(messages, sum(isinstance(one, tuple) for one in said))

    def render_prompt(self, prompt: Prompt, tools: Schemas = ()) -> tuple[str, list[int]]:
        """The tokens of its messages."""
        return "", list(map(self.token, as_messages(prompt)))

    def following_ids(self, messages: Sequence[Message], last: int, is_chat: bool) -> list[int]:
        """The tokens of the messages."""
        return list(map(self.token, messages))

    def read(self, ids: list[int], prefix: list[int], tools: Schemas, eos_ids: Sequence[int] = ()) -> ParsedTurn:
        """The reply that the token stands for; its calls are parsed if the environment's tools are run."""
        reply: Any = self.vocabulary[ids[0]]
        if isinstance(reply, str):
            content, calls = read_calls(reply) if tools else (reply, [])
            parts = {"tool_calls": [call.as_message_part() for call in calls]} if calls else {}
            message = {"role": "assistant", "content": content, **parts}
            reply = self.vocabulary[ids[0]] = message, AssistantTurn(content, tuple(calls))
        answer: ParsedTurn = reply
        return answer

    def check_tools(self) -> None:
        """No-op: there is no template."""


@dataclass(frozen=True)
class WrittenReplies:
    """An engine whose completions are the replies of policies, by the sampling seeds of the episodes; untrained
    conversations have other seeds."""

    chat: MessageFormat
    policies: defaultdict[int, Policy]

    async def generate(self, request: GenerationRequest) -> Completion:
        """The policy's next reply.

        Raises:
            OutOfRepliesError: it has none left.
        """
        policy = self.policies[-1 if request.seed is None else request.seed.seed]
        reply = policy(self.chat.conversation(request.prompt_ids))
        if reply is None:
            raise OutOfRepliesError
        return Completion([self.chat.token(reply)])

    @asynccontextmanager
    async def batch(self, episodes: int) -> AsyncIterator[Leave]:
        """Nothing is shared."""
        yield lambda: None


NO_END = EndOfTurn([0])
"""What rollouts of written replies need in place of token ids that end an answer."""


# -- playing


@dataclass(frozen=True)
class Play:
    """An episode to play."""

    case: Case
    policy: Policy
    seed: int = 0


@dataclass(frozen=True)
class PlayedEpisode:
    """An episode that was played and scored."""

    play: Play
    reset: ResetResult
    prompt: Prompt
    messages: list[Message]
    """Messages of the policy and the environment, from the first answer on."""
    member: GroupMember
    """The episode as `score_group` gets it."""
    stop: str
    """One of STOPS, or out_of_replies (the policy had none left)."""
    seconds: float
    """Seconds of the environment's calls together."""

    @property
    def result(self) -> ScoreResult:
        """Score, metrics and failure."""
        return self.member.result

    @property
    def score(self) -> float | None:
        """The score; None if there is none."""
        return self.result.score

    @property
    def failure(self) -> Failure | None:
        """What failed; None if nothing did."""
        return self.result.failure

    @property
    def replies(self) -> list[str]:
        """The texts of the policy's answers."""
        return [str(message["content"]) for message in self.messages if message["role"] == "assistant"]

    @property
    def heard(self) -> list[object]:
        """What the environment said, from the prompt on."""
        told = [message["content"] for message in self.messages if message["role"] != "assistant"]
        return [*(message["content"] for message in self.reset.messages), *told]

    @property
    def is_unknown(self) -> bool:
        """Whether the score says nothing about the reply: a service failed, or the environment left it out."""
        return is_of_service(self.failure) or (self.score is None and self.failure is None)


_SERVICE_ERROR = re.compile(
    r"(?i)\b(?:http|status|code|returned)\D{0,12}(?:429|50[234])\b|service unavailable|too many requests|rate.?limit"
    r"|(?:bad gateway|gateway time-?out)|connection (?:refused|reset|aborted)"
)
"""What an exception of the user's own says if a service failed."""


def is_of_service(failure: Failure | None) -> bool:
    """Whether a service failed that the environment asks, so that the failure says nothing about the reply."""
    if failure is None or failure.kind not in ("server", "raised"):
        return False
    return failure.kind == "server" or _SERVICE_ERROR.search(failure.message.partition("\n")[0]) is not None


class Player:
    """Plays episodes on one environment, many at the same time, with the deadlines and the isolation of a run."""

    def __init__(self, environment: Any, config: TrainConfig, runner: EnvRunner | None = None) -> None:
        self.runner = runner or start_runner(environment, config)
        self._limits = Limits(config.rl_max_turns, turn_tokens=1)
        self._loop = EventLoop()

    def play(self, plays: Sequence[Play]) -> list[PlayedEpisode]:
        """Play the episodes, and score them; failures of the environment are in the results."""
        chat = MessageFormat()
        engine = WrittenReplies(chat, defaultdict(lambda: EMPTY, enumerate(play.policy for play in plays)))
        rollout = Rollout(self.runner, engine, chat, self._limits, NO_END)
        cases, seeds = [play.case for play in plays], [play.seed for play in plays]
        return [
            PlayedEpisode(
                play,
                one.session.reset,
                one.prompt,
                one.messages,
                one.as_member,
                one.stop,
                one.session.seconds,
            )
            for play, one in zip(plays, self._loop.run(rollout.play(cases, seeds, range(len(plays)))), strict=True)
        ]

    def score_groups(self, groups: Sequence[Sequence[PlayedEpisode]]) -> list[list[ScoreResult]]:
        """The scores of episodes that `score_group` compares, each group of one case."""
        wanted = [Group(group[0].play.case, [episode.member for episode in group]) for group in groups]
        return self._loop.run(score_groups(self.runner, wanted))

    def close(self) -> None:
        """Close the environment, and end its threads and processes."""
        self.runner.close()
        self._loop.close()

    def stop(self) -> None:
        """End the loop, and leave the environment open, which a forked process must not close."""
        self._loop.close()
