"""A model that scores one answer by a rubric, such as `{"polite": "...", "right": "..."}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, field_validator

from aitrain.environment.contract import Prompt, Score
from aitrain.environment.judges.model_judge import (
    DATA_RULE,
    ModelJudge,
    Question,
    as_text,
    is_offline,
    number_in,
    quoted,
)

Text = Annotated[str, Field(min_length=1)]


class Rubric(ModelJudge, frozen=True):
    """Scores one answer from 0.0 to 1.0: the mean of its criteria, each of which is a metric."""

    rubric: Text | Annotated[Mapping[str, Text], Field(min_length=1)]
    """What to score by: one text, or a text for each criterion; none is called reason."""
    scale: tuple[int, int] = (0, 10)
    """Lowest and highest number that the model may give."""
    reference: str = "ground_truth"
    """Column with a right answer, which the model sees if the row has it."""
    reason: bool = False
    """Whether the model writes its reasons before the numbers, which costs tokens."""

    @field_validator("rubric", "scale")
    @classmethod
    def _check(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "reason" in value:
            raise ValueError("no criterion can be called reason")
        if isinstance(value, tuple) and value[0] >= value[1]:
            raise ValueError("scale must be two whole numbers with the lower one first, such as [0, 10]")
        return value

    @property
    def criteria(self) -> Mapping[str, str]:
        """The text of each criterion; a single one is called score."""
        return {"score": self.rubric} if isinstance(self.rubric, str) else self.rubric

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
        said = [] if isinstance(prompt, str) else messages[len(prompt) :]
        parts = [quoted("task", as_text(prompt))] if prompt else []
        if (case or {}).get(self.reference) is not None:
            parts.append(quoted("reference", str((case or {})[self.reference])))
        parts.append(quoted("answer", as_text(said) if len(said) > 1 else text))
        shares = await self.ask(Question(self._rule(), "\n\n".join(parts), self._schema(), self._read))
        named = dict(zip(self.criteria, shares, strict=True))
        return Score(sum(shares) / len(shares), named if len(named) > 1 else {})

    def _rule(self) -> str:
        low, high = self.scale
        criteria = "\n".join(f"- {name}: {text}" for name, text in self.criteria.items())
        reason = ['"reason": "your reasons in a few sentences"'] if self.reason else []
        form = ", ".join([*reason, *(f'"{name}": N' for name in self.criteria)])
        return (
            f"You score an answer to a task.\n{DATA_RULE}\n\nScore by:\n{criteria}\n\nEach N is a whole number from"
            f" {low} (worst) to {high} (best). Reply with one JSON object and nothing else: {{{form}}}"
        )

    def _schema(self) -> Mapping[str, Any]:
        low, high = self.scale
        number = {"type": "integer", "enum": list(range(low, high + 1))}
        reason = {"reason": {"type": "string"}} if self.reason else {}
        properties = {**reason, **dict.fromkeys(self.criteria, number)}
        return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

    def _read(self, reply: Mapping[str, Any]) -> list[float]:
        return [number_in(reply, name, *self.scale) for name in self.criteria]
