"""Plays one episode in the calling thread, so that breakpoint() and input() in the environment have the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aitrain.environment.contract import ScoreResult
from aitrain.environment.session import AssistantTurn, EnvResponse, Message, ResetResult, SessionLike, UntrainedChat
from aitrain.execution.async_calls import run_if_async
from aitrain.workbench.player import Conversation, Play, as_message


class Audience(Protocol):
    """Gets what happens in an episode, as it happens."""

    def opened(self, reset: ResetResult) -> None:
        """The episode has begun."""

    def answered(self, turn: AssistantTurn) -> None:
        """The policy has answered."""

    def heard(self, messages: Sequence[Message]) -> None:
        """The environment has responded, and the policy is asked again."""

    def asked_beside(self, chat: UntrainedChat) -> None:
        """The environment asks the policy in another conversation, which is not trained."""


@dataclass(frozen=True)
class StagedEpisode:
    """An episode that was played: its conversation, why it ended, and its score."""

    conversation: Conversation
    turns: int
    stop: str
    """done, max_turns, or out_of_replies (the policy had no further answer)."""
    result: ScoreResult


@dataclass(frozen=True)
class Stage:
    """Plays episodes of one session; `given` are the arguments `model` and `tokenizer` of `score_episode`."""

    session: SessionLike
    audience: Audience
    max_turns: int
    given: dict[str, object]

    def play(self, play: Play) -> StagedEpisode:
        """Play and score an episode.

        Raises:
            CallFailed: the environment failed.
        """
        reset = self._open(play)
        self.audience.opened(reset)
        conversation, turns, stop = Conversation(play.case, reset), 0, ""
        while not stop:
            turn = run_if_async(play.policy(conversation))
            if turn is None:
                stop = "out_of_replies"
                break
            self.audience.answered(turn)
            turns += 1
            response = self._respond(play, turn)
            messages = [*conversation.messages, as_message(turn)]
            if response.is_over:
                stop = "done"
            elif turns >= self.max_turns:
                stop = "max_turns"
            else:
                self.audience.heard(response.messages)
            # as in training, what is said after the last turn of a limit is not part of the episode
            messages += response.messages if stop != "max_turns" else ()
            conversation = Conversation(play.case, reset, tuple(messages))
        arguments = {**conversation.transcript.arguments(), **self.given}
        return StagedEpisode(conversation, turns, stop, self.session.score(arguments))

    def _open(self, play: Play) -> ResetResult:
        reset = self.session.open(play.case.arguments(seed=play.seed))
        if reset.untrained is None:
            return reset
        return self._answered(play, EnvResponse(untrained=reset.untrained)).reset or ResetResult()

    def _respond(self, play: Play, turn: AssistantTurn) -> EnvResponse:
        return self._answered(play, self.session.respond(turn))

    def _answered(self, play: Play, response: EnvResponse) -> EnvResponse:
        """The response, after the environment's questions in other conversations have been answered."""
        while response.untrained is not None:
            chat = response.untrained
            self.audience.asked_beside(chat)
            reset = ResetResult(chat.tools, runs_tools=bool(chat.tools), prompt=list(chat.messages))
            answer = run_if_async(play.policy(Conversation(play.case, reset))) or AssistantTurn("")
            self.audience.answered(answer)
            response = self.session.respond(answer)
        return response
