"""A model that scores one answer by a rubric, such as `{"polite": "...", "right": "..."}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from aitrain.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Rubric(ModelJudge):
    """Scores one answer from 0.0 to 1.0: the mean of its criteria, each of which is a metric."""

    rubric: str | Mapping[str, str]
    """What to score by: one text, or a text for each criterion."""
    scale: Sequence[int] = (0, 10)
    """Lowest and highest number that the model may give."""
    reference: str = "ground_truth"
    """Column with a right answer, which the model sees if the row has it."""
    reason: bool = False
    """Whether the model writes its reasons before the numbers, which costs tokens."""

    def check(self) -> None:
        """Check all settings.

        Raises:
            ConfigError: one is wrong.
        """
        super().check()
        texts = self.criteria.values() if isinstance(self.rubric, (str, Mapping)) else ()
        if not texts or not all(isinstance(text, str) and text for text in texts) or "reason" in self.criteria:
            raise ConfigError("judges: rubric must be a text, or texts by the names of criteria; none is called reason")
        if (
            len(self.scale) != 2
            or not all(isinstance(end, int) for end in self.scale)
            or self.scale[0] >= self.scale[1]
        ):
            raise ConfigError("judges: scale must be two whole numbers with the lower one first, such as [0, 10]")

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
