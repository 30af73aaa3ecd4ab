"""Plays episodes whose replies are written and not sampled, by a script, a person or a record: the policy is an engine,
and the loop is that of a training."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aitrain.environment.completion_parser import ToolJson
from aitrain.environment.contract import Case, call_by_name
from aitrain.environment.runner import EnvRunner
from aitrain.environment.session import Message
from aitrain.execution.user_code import users_errors
from aitrain.rollout.engine import Completion, Engine, GenerationRequest, OutOfRepliesError
from aitrain.rollout.episode import Episode, Rollout
from aitrain.rollout.event_loop import event_loop
from aitrain.rollout.message_format import END, MessageFormat

JUNK_TEXT = "qwzx jjkp 0x1f ~~ lorem vv"
"""An answer without meaning: no words of a task, no number, no format."""


# -- policies


@dataclass(frozen=True)
class Conversation:
    """What a policy sees before its next reply: all messages, how many of them are its own, and its tools."""

    messages: list[Message]
    answers: int
    tools: list[ToolJson]


Policy = Callable[[Conversation], str | Message | None]
"""Gives the next reply in a conversation, or the whole message; None if it has none left, which ends the episode like a
limit."""


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


_REVEALED = re.compile(r"(?i)\b(?:answer|solution|word|number|result|it)\W+(?:was|is)\W+([^\s.,;!]+)")


@dataclass(frozen=True)
class Parrot:
    """A policy that repeats what the environment said last: if it gives an answer away there, that alone."""

    def __call__(self, said: Conversation) -> str:
        """The repetition."""
        heard = (message for message in reversed(said.messages) if message["role"] != "assistant")
        text = str(next(heard, {}).get("content") or "")
        revealed = _REVEALED.search(text)
        return revealed[1] if revealed else text


EMPTY, JUNK = Constant(""), Constant(JUNK_TEXT)


def reference_of(environment: Any, case: Case) -> Script | None:
    """The replies that `environment.reference` returns; None if it has no such method, or returns None.

    Raises:
        EnvironmentFailed: it raised; the message has the line in the user's code.
    """
    if not callable(getattr(environment, "reference", None)):
        return None
    with users_errors(f"reference of case {case.case_idx} raised"):
        found = call_by_name(environment.reference, case.arguments())
    if found is None:
        return None
    return Script(tuple(map(str, found)) if isinstance(found, (list, tuple)) else (str(found),))


# -- the engine of written replies


@dataclass(frozen=True)
class WrittenReplies(Engine):
    """An engine whose completions are the replies of policies, by the sampling seeds of the episodes; untrained
    conversations have other seeds."""

    chat: MessageFormat
    policies: defaultdict[int, Policy]
    end = END

    async def generate(self, request: GenerationRequest) -> Completion:
        """The policy's next reply.

        Raises:
            OutOfRepliesError: it has none left.
        """
        policy = self.policies[request.seed.seed]
        messages, tools = self.chat.conversation(request.prompt_ids)
        answers = len(request.prompt_ids) // 2  # an id for the prompt, then for each answer and for what followed it
        reply = policy(Conversation(messages, answers, tools))
        if reply is None:
            raise OutOfRepliesError
        message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
        return Completion(self.chat.completion_ids(message))


def rollout_of(runner: EnvRunner, policies: defaultdict[int, Policy]) -> Rollout:
    """Rollouts whose completions are the replies of policies, see WrittenReplies."""
    chat = MessageFormat()
    return Rollout(runner, WrittenReplies(chat, policies), chat, None)


# -- playing


def replied(episode: Episode) -> list[str]:
    """The texts of the policy's answers, or their calls."""
    answers = [message for message in episode.messages if message["role"] == "assistant"]
    return [str(message["content"] or message.get("tool_calls") or "") for message in answers]


class Player:
    """Plays episodes on one environment, many at the same time, with the deadlines and the isolation of a run."""

    def __init__(self, runner: EnvRunner) -> None:
        """`runner` is closed with it."""
        self.runner = runner
        self._loop = event_loop()

    def play(self, pairs: Sequence[tuple[Case, Policy]], seeds: Sequence[int] | None = None) -> list[Episode]:
        """Play the policies on the cases, and score the episodes; failures of the environment are in the results.
        `seeds` are the environment's; without any, each case has its own, as what is right may be drawn by it."""
        policies = defaultdict[int, Policy](lambda: EMPTY, enumerate(policy for _, policy in pairs))
        rollout = rollout_of(self.runner, policies)
        cases = [case for case, _ in pairs]
        return self._loop.run(rollout.play(cases, seeds or [case.number for case in cases], range(len(cases))))

    def close(self) -> None:
        """Close the environment, and end its threads and processes."""
        self.runner.close()
        self._loop.close()
