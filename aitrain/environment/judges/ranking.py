"""A model that ranks the answers of a group against each other."""

import random
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from aitrain.environment.contract import Prompt
from aitrain.environment.judges.model_judge import DATA_RULE, ModelJudge, as_text, is_offline


class Ranking(ModelJudge, frozen=True):
    """Ranks the answers of a group: 1.0 for the best, 0.0 for the worst; equal answers have equal scores. It ranks them
    in a shuffled order and in its reverse, as models prefer answers by their place."""

    rubric: str = Field(min_length=1)
    """What makes an answer better."""

    async def __call__(self, texts: Sequence[str], prompt: Prompt = "") -> list[float | None]:
        """The score of each answer; None for an answer that is alone.

        Raises:
            CallFailed: the model cannot be asked, or gives no ranking.
        """
        if is_offline() or len(texts) < 2:
            return [None] * len(texts)
        distinct = sorted(set(texts))
        count = len(distinct)
        if count == 1:
            return [0.5] * len(texts)
        rule = (
            f"You rank {count} answers to a task.\n{DATA_RULE}\n\nAn answer is better by this: {self.rubric}\n\n"
            'Reply with one JSON object and nothing else: {"ranking": [numbers of all answers, the best one first]}'
        )
        numbers = list(range(1, count + 1))

        def complete(ranking: list[int]) -> list[int]:
            if sorted(ranking) != numbers:
                raise ValueError(f"it must have each number from 1 to {count} once")
            return ranking

        form = list[Literal[tuple(numbers)]]  # type: ignore[misc, valid-type]
        length = Field(min_length=count, max_length=count)
        fields = {"ranking": Annotated[form, length, AfterValidator(complete)]}
        seed = "\0".join([as_text(prompt), *distinct]).encode(errors="replace")
        totals = dict.fromkeys(distinct, 0.0)
        shuffled = random.Random(seed).sample(distinct, count)
        for order in (shuffled, shuffled[::-1]):
            answers = {f"answer-{place}": text for place, text in enumerate(order, 1)}
            (ranking,) = await self.ask(rule, prompt, answers, fields)
            for place, number in enumerate(ranking):
                totals[order[number - 1]] += (1 - place / (count - 1)) / 2
        return [totals[text] for text in texts]
