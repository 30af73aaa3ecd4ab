"""The episodes of one case, as `score_group` of an environment gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aitrain.environment.contract import Case
from aitrain.environment.score_parsing import ScoreResult
from aitrain.environment.session import Message


@dataclass(frozen=True)
class GroupMember:
    """One episode of a group, and its own score, None if it failed."""

    completion: str | list[Message]
    text: str
    messages: list[Message]
    result: ScoreResult


@dataclass(frozen=True)
class Group:
    """The episodes of one case that are compared."""

    case: Case
    members: Sequence[GroupMember]

    def arguments(self) -> dict[str, Any]:
        """All arguments for `score_group`; a column with one of our names is not passed."""
        results = [member.result for member in self.members]
        return {
            **self.case.row,
            "completions": [member.completion for member in self.members],
            "texts": [member.text for member in self.members],
            "messages": [member.messages for member in self.members],
            "scores": [result.score for result in results],
            "metrics": [result.metrics for result in results],
            "case_idx": self.case.case_idx,
            "prompt": self.case.prompt,
            "case": dict(self.case.row),
        }
