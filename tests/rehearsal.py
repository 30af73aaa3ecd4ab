"""An episode without a model: the replies are written down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from aitrain.environment.completion_parser import read_calls
from aitrain.environment.contract import Case, ScoreResult, Transcript
from aitrain.environment.rollout_session import session_for
from aitrain.environment.session import AssistantTurn, EnvResponse


@dataclass
class Rehearsed:
    """What came of it."""

    scored: ScoreResult
    opening: EnvResponse
    moves: list[EnvResponse] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether the environment ended it, and not the end of the script."""
        return bool(self.moves) and self.moves[-1].is_over


def call(name: str, /, **arguments: Any) -> str:
    """What the policy writes to call a tool."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def rehearse(environment: Any, replies: Sequence[str], case: Case | None = None, seed: int = 0) -> Rehearsed:
    """Play the replies, one a turn, tool calls in the `<tool_call>` form; then score."""
    case = case or Case(0, [{"role": "user", "content": "?"}], {"prompt": "?"})
    dialogue = session_for(environment)
    opening = dialogue.open(case.arguments(seed=seed))
    moves: list[EnvResponse] = []
    messages: list[dict[str, Any]] = []
    for written in replies:
        text, calls = read_calls(written) if opening.runs_tools else (written, [])
        messages.append({"role": "assistant", "content": text})
        moves.append(dialogue.respond(AssistantTurn(text, tuple(calls))))
        messages.extend(moves[-1].messages)
        if moves[-1].is_over:
            break
    content = messages if case.is_chat else "".join(message["content"] for message in messages)
    scored = dialogue.score(Transcript(case, content).arguments()).in_range()
    dialogue.close()
    return Rehearsed(scored, opening, moves)
