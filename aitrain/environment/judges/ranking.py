"""A model that ranks the answers of a group against each other."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import Field

from aitrain.environment.contract import Prompt
from aitrain.environment.judges.model_judge import DATA_RULE, ModelJudge, Question, as_text, is_offline, quoted


class Ranking(ModelJudge, frozen=True):
    """Ranks the answers of a group: 1.0 for the best, 0.0 for the worst; equal answers have equal scores."""

    rubric: str = Field(min_length=1)
    """What makes an answer better."""
    orders: int = Field(2, ge=1)
    """How often the model ranks them: in a shuffled order, in its reverse, in another shuffled order; the scores are
    averaged, as models prefer answers by their place."""

    async def __call__(self, texts: Sequence[str], prompt: Prompt = "") -> list[float | None]:
        """The score of each answer; None for an answer that is alone.

        Raises:
            CallFailed: the model cannot be asked, or gives no ranking.
        """
        if is_offline() or len(texts) < 2:
            return [None] * len(texts)
        distinct = sorted(set(texts))
        if len(distinct) == 1:
            return [0.5] * len(texts)
        seed = hashlib.sha256("\0".join([as_text(prompt), *distinct]).encode(errors="replace")).hexdigest()
        totals = dict.fromkeys(distinct, 0.0)
        for number in range(self.orders):
            order = random.Random(f"{seed}{number // 2}").sample(distinct, len(distinct))
            order = order[::-1] if number % 2 else order
            for text, share in zip(order, await self._shares(order, prompt), strict=True):
                totals[text] += share / self.orders
        return [totals[text] for text in texts]

    async def _shares(self, order: Sequence[str], prompt: Prompt) -> list[float]:
        """For each answer, the share of the others that are ranked below it."""
        numbers = list(range(1, len(order) + 1))
        rule = (
            f"You rank {len(order)} answers to a task.\n{DATA_RULE}\n\nAn answer is better by this: {self.rubric}\n\n"
            'Reply with one JSON object and nothing else: {"ranking": [numbers of all answers, the best one first]}'
        )
        answers = [quoted(f"answer-{number}", text) for number, text in zip(numbers, order, strict=True)]
        items = {"type": "integer", "enum": numbers}
        ranking = {"type": "array", "items": items, "minItems": len(order), "maxItems": len(order)}
        fields = {"properties": {"ranking": ranking}, "required": ["ranking"]}
        schema = {"type": "object", **fields, "additionalProperties": False}
        data = "\n\n".join([*([quoted("task", as_text(prompt))] if prompt else []), *answers])
        return await self.ask(Question(rule, data, schema, partial(_shares_of, count=len(order))))


def _shares_of(reply: Mapping[str, Any], count: int) -> list[float]:
    ranking, numbers = reply.get("ranking"), range(1, count + 1)
    if not isinstance(ranking, list) or not all(type(one) is int for one in ranking) or sorted(ranking) != [*numbers]:
        raise ValueError(f"ranking must have each number from 1 to {count} once, not {str(ranking)[:60]}")
    return [1 - ranking.index(number) / (count - 1) for number in numbers]
