"""The calls of an EnvRunner, made from tests that are not async."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aitrain.environment.contract import Case, ScoreResult, Transcript
from aitrain.environment.runner import EnvRunner, EnvSession
from aitrain.environment.session import AssistantTurn, EnvResponse


def open_sessions(runner: EnvRunner, cases: Sequence[Case], seeds: Sequence[int]) -> list[EnvSession]:
    """One session for each case."""
    sessions = [EnvSession(*pair) for pair in zip(cases, seeds, strict=True)]
    asyncio.run(runner.open(sessions))
    return sessions


def respond(runner: EnvRunner, sessions: Sequence[EnvSession], turns: Sequence[AssistantTurn]) -> list[EnvResponse]:
    """The environment's response to one turn in each session, all at the same time."""

    async def all_of() -> list[EnvResponse]:
        pairs = zip(sessions, turns, strict=True)
        return await asyncio.gather(*(runner.respond(session, turn) for session, turn in pairs))

    return asyncio.run(all_of())


def score(runner: EnvRunner, sessions: Sequence[EnvSession], transcripts: Sequence[Transcript]) -> list[ScoreResult]:
    """The score of each session."""
    asyncio.run(runner.score(dict(zip(sessions, transcripts, strict=True))))
    return [one.result for one in sessions]


def end(runner: EnvRunner, sessions: Sequence[EnvSession]) -> None:
    """Close the sessions."""
    asyncio.run(runner.end(sessions))
