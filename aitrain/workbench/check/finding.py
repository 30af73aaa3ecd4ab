"""What a check finds, and scores as a share of what the reference earns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["fail", "warning", "info"]
"""A run on an environment with a `fail` learns something wrong or ends; `info` is a fact that is worth knowing."""
NO_TIME = "no time left"
"""Why a check was skipped after the time of all checks."""
PASS = 0.99
"""Share of what the reference earns from which a reply passes."""


@dataclass(frozen=True)
class EnvFinding:
    """One finding about an environment."""

    check: str
    """Name of the check."""
    level: Level
    what: str
    """What was found, in one or two sentences."""
    why: str = ""
    """Why it hurts training."""
    fix: str = ""
    """How to mend it."""
    case_idx: object = None
    """The case that shows it; None if it is about the whole."""

    def to_json(self) -> dict[str, object]:
        """The finding as a JSON object."""
        case_idx = self.case_idx
        plain = case_idx if isinstance(case_idx, (str, int, float, bool, type(None))) else str(case_idx)
        return {**asdict(self), "case_idx": plain}


@dataclass(frozen=True)
class Scale:
    """What scores of a case are measured against: the score that earns nothing, and the one that earns all."""

    zero: float
    full: float | None
    """None if nothing earns: then shares are uncalibrated."""
    by_reference: bool = True
    """Whether `full` is what the reference earned; else it is the highest score of the range."""

    def share(self, score: float | None) -> float | None:
        """The score as a share of `full`; None if it is missing or uncalibrated."""
        if score is None or self.full is None or self.full <= self.zero:
            return None
        return (score - self.zero) / (self.full - self.zero)

    def shown(self, share: float | None) -> str:
        """A share in words: `40 % of what the reference earns`."""
        if share is None:
            return "uncalibrated"
        return f"{share:.0%} of {'what the reference earns' if self.by_reference else 'the highest score'}"
