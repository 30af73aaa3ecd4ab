"""Plays one episode in the calling thread, so that breakpoint() and input() in the environment have the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aitrain.environment.contract import Transcript
from aitrain.environment.score_parsing import ScoreResult
from aitrain.environment.session import AssistantTurn, EnvResponse, Message, ResetResult, Session, UntrainedChat
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


def stage(session: Session, play: Play, max_turns: int, audience: Audience, given: dict[str, object]) -> StagedEpisode:
    """Play and score an episode; `given` are the arguments `model` and `tokenizer` of `score_episode`.

    Raises:
        CallFailed: the environment failed.
    """
    reset = session.open(play.case.arguments(play.seed))
    audience.opened(reset)
    conversation, turns, stop = Conversation(play.case, reset), 0, ""
    while not stop:
        turn = _answer(play, conversation)
        if turn is None:
            stop = "out_of_replies"
            break
        audience.answered(turn)
        turns += 1
        response = _respond(session, play, turn, audience)
        messages = [*conversation.messages, as_message(turn)]
        if response.is_over:
            stop = "done"
        elif turns >= max_turns:
            stop = "max_turns"
        else:
            audience.heard(response.messages)
        # as in training, what is said after the last turn of a limit is not part of the episode
        messages += response.messages if stop != "max_turns" else ()
        conversation = Conversation(play.case, reset, tuple(messages))
    arguments = {**_transcript(conversation).arguments(), **given}
    return StagedEpisode(conversation, turns, stop, session.score(arguments))


def _answer(play: Play, conversation: Conversation) -> AssistantTurn | None:
    return run_if_async(play.policy(conversation))


def _respond(session: Session, play: Play, turn: AssistantTurn, audience: Audience) -> EnvResponse:
    """The environment's response; answers its questions in other conversations first."""
    response = session.respond(turn)
    while response.untrained is not None:
        chat = response.untrained
        audience.asked_beside(chat)
        beside = Conversation(
            play.case, ResetResult(chat.tools, prompt=list(chat.messages), runs_tools=bool(chat.tools))
        )
        answer = _answer(play, beside) or AssistantTurn("")
        audience.answered(answer)
        response = session.respond(answer)
    return response


def _transcript(conversation: Conversation) -> Transcript:
    messages = conversation.messages
    if isinstance(conversation.prompt, str):
        return Transcript(conversation.case, "".join(str(message["content"]) for message in messages))
    return Transcript(conversation.case, list(messages))
