"""A model that scores one answer by a rubric, such as `{"polite": "...", "right": "..."}`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from aitrain.environment.contract import Prompt, Score
from aitrain.environment.judges.model_judge import DATA_RULE, ModelJudge, as_text, is_offline

BEST = 10
"""The highest number that the model may give; 0 is the lowest."""
Number = Annotated[
    float, Field(strict=True, ge=0, le=BEST), WithJsonSchema({"type": "integer", "enum": list(range(BEST + 1))})
]
Text = Annotated[str, Field(min_length=1)]


class Rubric(ModelJudge, frozen=True):
    """Scores one answer from 0.0 to 1.0: the mean of its criteria, each of which is a metric."""

    rubric: Text | Annotated[Mapping[str, Text], Field(min_length=1)]
    """What to score by: one text, or a text for each criterion."""
    reference: str = "ground_truth"
    """Column with a right answer, which the model sees if the row has it."""

    async def __call__(
        self,
        text: str,
        prompt: Prompt = "",
        messages: Sequence[Mapping[str, Any]] = (),
        case: Mapping[str, Any] | None = None,
    ) -> Score:
        """The score of an answer; of a conversation of several turns, all of it is judged.

        Raises:
            CallFailed: the model cannot be asked, or gives no verdict.
        """
        if is_offline():
            return Score(None)
        criteria = {"score": self.rubric} if isinstance(self.rubric, str) else self.rubric
        example = ", ".join(f'"{name}": N' for name in criteria)
        rule = (
            f"You score an answer to a task.\n{DATA_RULE}\n\nScore by:\n"
            + "\n".join(f"- {name}: {criterion}" for name, criterion in criteria.items())
            + f"\n\nEach N is a whole number from 0 (worst) to {BEST} (best)."
            f" Reply with one JSON object and nothing else: {{{example}}}"
        )
        said = [] if isinstance(prompt, str) else messages[len(prompt) :]
        truth = (case or {}).get(self.reference)
        texts = {"reference": str(truth)} if truth is not None else {}
        texts["answer"] = as_text(said) if len(said) > 1 else text
        numbers = await self.ask(rule, prompt, texts, dict.fromkeys(criteria, Number))
        shares = [one / BEST for one in numbers]
        return Score(sum(shares) / len(shares), dict(zip(criteria, shares, strict=True)) if len(shares) > 1 else {})
