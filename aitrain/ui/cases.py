"""The cases of a run, each with its first and its last score."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import fmean

from aitrain.runs.held_out import NEARLY
from aitrain.runs.json_values import JsonObject
from aitrain.runs.rollout_index import IndexEntry, RolloutIndex


@dataclass(frozen=True)
class CaseRow:
    """One case with its scores, None if nothing was scored."""

    case: str
    case_idx: str
    """The environment's name for it."""
    is_held_out: bool
    prompt: str
    first: float | None
    last: float | None
    change: float | None
    """`last` less `first`; None if the case was played at one time only."""
    best: float | None
    """The highest score of its last group or scoring."""
    environment: str = ""
    """Name of its environment, in a run with several."""

    @property
    def direction(self) -> str:
        """How its score changed: `better`, `same` or `worse`; `once` if it was played at one time only."""
        if self.change is None:
            return "once"
        return "same" if abs(self.change) < NEARLY else "better" if self.change > 0 else "worse"


def case_rows(rollouts: RolloutIndex) -> list[CaseRow]:
    """A row for each case, in the order of their first episodes; without greedy scorings, which are no samples of the
    policy."""
    by_case: dict[tuple[bool, str], list[IndexEntry]] = {}
    for entry in rollouts.entries:
        if not entry.eval_phase.endswith("greedy"):
            by_case.setdefault((entry.is_held_out, entry.case), []).append(entry)
    return [_row(key, entries, rollouts.prompts.get(key, "")) for key, entries in by_case.items()]


def _row(key: tuple[bool, str], entries: list[IndexEntry], prompt: str) -> CaseRow:
    visits: dict[tuple[int, bool, int], list[float]] = {}
    for entry in entries:
        scores = visits.setdefault((entry.step, entry.eval_phase.startswith("after"), entry.group), [])
        scores += [] if entry.score is None else [entry.score]
    first, last = visits[min(visits)], visits[max(visits)]
    is_twice = len(visits) > 1 and bool(first and last)
    return CaseRow(
        case=key[1],
        case_idx=entries[0].case_idx,
        is_held_out=key[0],
        prompt=prompt,
        first=fmean(first) if first else None,
        last=fmean(last) if last else None,
        change=fmean(last) - fmean(first) if is_twice else None,
        best=max(last, default=None),
        environment=entries[0].environment,
    )


def case_changes(rows: Iterable[CaseRow]) -> dict[str, dict[str, int]]:
    """Numbers of held-out and of training cases whose mean score rose, stayed and fell, and of those played once."""
    counts = {name: {"better": 0, "same": 0, "worse": 0, "once": 0} for name in ("held_out", "training")}
    for row in rows:
        counts["held_out" if row.is_held_out else "training"][row.direction] += 1
    return counts


def cases_json(rollouts: RolloutIndex, most: int) -> JsonObject:
    """The cases for a page: at most `most`, those whose score changed most; up to half of them are held out."""
    rows = shown = case_rows(rollouts)
    if len(rows) > most:
        ranked = sorted(rows, key=lambda row: -abs(row.change or 0.0))
        held_out = [row for row in ranked if row.is_held_out][: most // 2]
        shown = [*held_out, *[row for row in ranked if not row.is_held_out][: most - len(held_out)]]
    return {"rows": list(map(asdict, shown)), "count": len(rows), "changes": case_changes(rows)}
