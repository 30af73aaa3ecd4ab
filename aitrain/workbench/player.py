"""Plays episodes of an environment with scripted policies: no model, no tokens, the calls as in training."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aitrain.environment.contract import Case, Prompt, ScoreResult, Transcript, call_reference
from aitrain.environment.runner import EnvRunner, EnvSession, score_groups, start_runner
from aitrain.environment.session import AssistantTurn, EnvResponse, Group, GroupMember, Message, ResetResult
from aitrain.environment.tool_call_parser import read_calls
from aitrain.execution.failure import Failure
from aitrain.options.train import TrainConfig
from aitrain.rollout.event_loop import EventLoop

JUNK_TEXT = "qwzx jjkp 0x1f ~~ lorem vv"
"""An answer without meaning: no words of a task, no number, no format."""


@dataclass(frozen=True)
class Conversation:
    """What a policy sees before its next answer."""

    case: Case
    reset: ResetResult
    """The start of the episode, with its tools."""
    messages: tuple[Message, ...] = ()
    """Messages of the policy and the environment, from the first answer on."""

    @property
    def prompt(self) -> Prompt:
        """What the policy answers first: the row's prompt, and what the environment says when the episode begins."""
        return self.case.prompt if self.reset.prompt is None else self.reset.prompt

    @property
    def answers(self) -> int:
        """How many answers the policy has given."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def transcript(self) -> Transcript:
        """The conversation as `score_episode` gets it."""
        said = "".join(str(message["content"]) for message in self.messages)
        return Transcript(self.case, said if isinstance(self.prompt, str) else list(self.messages))

    def turn(self, text: str) -> AssistantTurn:
        """An answer as the environment gets it: its tool calls are parsed if the environment's tools are run."""
        content, calls = read_calls(text) if self.reset.runs_tools else (text, [])
        return AssistantTurn(content, tuple(calls))


Policy = Callable[[Conversation], AssistantTurn | Awaitable[AssistantTurn | None] | None]
"""Gives the next answer in a conversation; None if it has none left, which ends the episode like a limit."""


@dataclass(frozen=True)
class Script:
    """A policy that gives these replies in this order."""

    replies: tuple[str, ...]

    def ending_in(self, reply: str) -> Script:
        """The same replies, with another last one."""
        return Script((*self.replies[:-1], reply))

    def __call__(self, conversation: Conversation) -> AssistantTurn | None:
        """The next reply."""
        said = conversation.answers
        return conversation.turn(self.replies[said]) if said < len(self.replies) else None


@dataclass(frozen=True)
class Constant:
    """A policy that gives the same reply in every turn."""

    text: str

    def __call__(self, conversation: Conversation) -> AssistantTurn:
        """The reply."""
        return conversation.turn(self.text)


_REVEALED = re.compile(r"(?i)(?:answer|solution|word|number|result)\W+(?:was|is)\W+([^\s.,;!]+)")


@dataclass(frozen=True)
class Parrot:
    """A policy that repeats what the environment said last, or only the answer that it gives away there."""

    only_answer: bool = False

    def __call__(self, conversation: Conversation) -> AssistantTurn:
        """The repetition."""
        prompt = conversation.prompt
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        last: Message = next((m for m in reversed([*said, *conversation.messages]) if m["role"] != "assistant"), {})
        text = str(last.get("content") or "")
        revealed = _REVEALED.search(text) if self.only_answer else None
        return AssistantTurn(revealed[1] if revealed else text)


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
    conversation: Conversation
    turns: tuple[AssistantTurn, ...]
    stop: str
    """done, max_turns, out_of_replies (the policy had none left), env_error or env_timeout."""
    score: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    failure: Failure | None = None
    seconds: float = 0.0
    """Seconds of the environment's calls together."""

    @property
    def messages(self) -> tuple[Message, ...]:
        """Messages of the policy and the environment, from the first answer on."""
        return self.conversation.messages

    @property
    def as_member(self) -> GroupMember:
        """The episode as `score_group` gets it."""
        transcript = self.conversation.transcript
        asked = self.conversation.prompt
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        result = ScoreResult(self.score, self.metrics, self.failure)
        return GroupMember(transcript.content, transcript.text, [*messages, *self.messages], result)


@dataclass
class _Running:
    """An episode while it is played."""

    play: Play
    session: EnvSession
    messages: list[Message] = field(default_factory=list)
    turns: list[AssistantTurn] = field(default_factory=list)
    stop: str = ""

    @property
    def conversation(self) -> Conversation:
        return Conversation(self.play.case, self.session.reset, tuple(self.messages))


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


def is_unknown(episode: PlayedEpisode) -> bool:
    """Whether the score says nothing about the reply: a service failed, or the environment left it out."""
    return is_of_service(episode.failure) or (episode.score is None and episode.failure is None)


class Player:
    """Plays episodes on one environment, many at the same time, with the deadlines and the isolation of a run."""

    def __init__(self, environment: Any, config: TrainConfig, runner: EnvRunner | None = None) -> None:
        self.config = config
        self.runner = runner or start_runner(environment, config)
        self._loop = EventLoop()

    def play(self, plays: Sequence[Play]) -> list[PlayedEpisode]:
        """Play the episodes, and score them; failures of the environment are in the results."""
        return self._loop.run(self._play(plays)) if plays else []

    def score_groups(self, groups: Sequence[Sequence[PlayedEpisode]]) -> list[list[ScoreResult]]:
        """The scores of episodes that `score_group` compares, each group of one case."""
        wanted = [Group(group[0].play.case, [episode.as_member for episode in group]) for group in groups]
        return self._loop.run(score_groups(self.runner, wanted))

    def close(self) -> None:
        """Close the environment, and end its threads and processes."""
        self.runner.close()
        self._loop.close()

    def stop(self) -> None:
        """End the loop, and leave the environment open, which a forked process must not close."""
        self._loop.close()

    async def _play(self, plays: Sequence[Play]) -> list[PlayedEpisode]:
        """As in training: first those that may not run beside others, then the others at the same time."""
        played = {n: (await self._play_together([play]))[0] for n, play in enumerate(plays) if self.runner.plays_alone}
        others = [n for n in range(len(plays)) if n not in played]
        played |= zip(others, await self._play_together([plays[n] for n in others]), strict=True)
        return [played[n] for n in range(len(plays))]

    async def _play_together(self, plays: Sequence[Play]) -> list[PlayedEpisode]:
        sessions = await self.runner.open([play.case for play in plays], [play.seed for play in plays])
        running = [_Running(*pair) for pair in zip(plays, sessions, strict=True)]
        await asyncio.gather(*(self._converse(one) for one in running if one.session.failure is None))
        results = await self.runner.score(sessions, [one.conversation.transcript for one in running])
        await self.runner.end(sessions)
        return [
            PlayedEpisode(
                one.play,
                one.conversation,
                tuple(one.turns),
                _stop_of(result.failure) or one.stop,
                result.score,
                result.metrics,
                result.failure,
                one.session.seconds,
            )
            for one, result in zip(running, results, strict=True)
        ]

    async def _converse(self, one: _Running) -> None:
        untrained = one.session.reset.untrained
        if untrained is not None:
            response = await self._answered(one, EnvResponse(untrained=untrained))
            one.session.reset, one.stop = response.reset or ResetResult(), _stop_of(one.session.failure)
        while not one.stop:
            given = one.play.policy(one.conversation)
            turn = await given if inspect.isawaitable(given) else given
            if turn is None:
                one.stop = "out_of_replies"
                return
            one.turns.append(turn)
            one.messages.append(as_message(turn))
            response = await self._answered(one, await self.runner.respond(one.session, turn))
            one.stop = self._stop_after(one, response)
            if one.stop in ("", "done"):  # as in training, an episode does not have what is said after its last turn
                one.messages += response.messages

    async def _answered(self, one: _Running, response: EnvResponse) -> EnvResponse:
        """The response after the environment's untrained conversations, which get empty answers."""
        while response.untrained is not None and one.session.failure is None:
            response = await self.runner.respond(one.session, AssistantTurn(""))
        return response

    def _stop_after(self, one: _Running, response: EnvResponse) -> str:
        if one.session.failure is not None:
            return _stop_of(one.session.failure)
        if response.is_over:
            return "done"
        return "max_turns" if len(one.turns) >= self.config.rl_max_turns else ""


def _stop_of(failure: Failure | None) -> str:
    if failure is None:
        return ""
    return "env_timeout" if failure.kind == "timed_out" else "env_error"


def as_message(turn: AssistantTurn) -> Message:
    """An answer as a message of the conversation."""
    message: Message = {"role": "assistant", "content": turn.text}
    return {**message, "tool_calls": [call.as_message_part() for call in turn.calls]} if turn.calls else message
