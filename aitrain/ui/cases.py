"""The cases of a run, each with its first and its last score."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Literal, TypedDict

from aitrain.runs.held_out import NEARLY
from aitrain.runs.rollout_index import IndexEntry, RolloutIndex


@dataclass(frozen=True)
class CaseRow:
    """One case with its scores, None if nothing was scored; `variance` is that of all its scores."""

    case: str
    case_idx: str
    """The environment's name for it."""
    is_held_out: bool
    prompt: str
    episodes: int
    failed: int
    first: float | None
    last: float | None
    change: float | None
    """`last` less `first`; None if the case was played at one time only."""
    best: float | None
    """The highest score of its last group or scoring."""
    variance: float | None
    environment: str = ""
    """Name of its environment, in a run with several."""


def case_rows(rollouts: RolloutIndex) -> list[CaseRow]:
    """A row for each case, in the order of their first episodes; without greedy scorings, which are no samples of the
    policy."""
    by_case: dict[tuple[bool, str], list[IndexEntry]] = {}
    for entry in rollouts.entries:
        if not entry.eval_phase.endswith("greedy"):
            by_case.setdefault((entry.is_held_out, entry.case), []).append(entry)
    return [_row(key, entries, rollouts.prompts.get(key, "")) for key, entries in by_case.items()]


def _row(key: tuple[bool, str], entries: list[IndexEntry], prompt: str) -> CaseRow:
    first, last = min(map(_visit, entries)), max(map(_visit, entries))
    first_score = mean_score(entry for entry in entries if _visit(entry) == first)
    last_score = mean_score(entry for entry in entries if _visit(entry) == last)
    change = None
    if first != last and first_score is not None and last_score is not None:
        change = last_score - first_score
    last_ones = [entry.score for entry in entries if _visit(entry) == last and entry.score is not None]
    scores = [entry.score for entry in entries if entry.score is not None]
    return CaseRow(
        case=key[1],
        case_idx=entries[0].case_idx,
        is_held_out=key[0],
        prompt=prompt,
        episodes=len(entries),
        failed=sum(bool(entry.failure) for entry in entries),
        first=first_score,
        last=last_score,
        change=change,
        best=max(last_ones, default=None),
        variance=pvariance(scores) if scores else None,
        environment=entries[0].environment,
    )


def _visit(entry: IndexEntry) -> tuple[int, bool, int]:
    """Sort key of a case's groups and scorings: the one before training is at step 0, the one after training last."""
    return entry.step, entry.eval_phase.startswith("after"), entry.group


def mean_score(entries: Iterable[IndexEntry]) -> float | None:
    """Mean score of the scored entries; None if there are none."""
    scores = [entry.score for entry in entries if entry.score is not None]
    return fmean(scores) if scores else None


class CaseChanges(TypedDict):
    """Numbers of cases whose mean score rose, stayed, and fell; `once` were played at one time only."""

    better: int
    same: int
    worse: int
    once: int


def case_changes(rows: Iterable[CaseRow]) -> dict[str, CaseChanges]:
    """The changes of the held-out cases, and of those of the training."""
    counts: dict[str, CaseChanges] = {
        name: {"better": 0, "same": 0, "worse": 0, "once": 0} for name in ("held_out", "training")
    }
    for row in rows:
        counts["held_out" if row.is_held_out else "training"][_direction(row.change)] += 1
    return counts


def _direction(change: float | None) -> Literal["better", "same", "worse", "once"]:
    if change is None:
        return "once"
    return "same" if abs(change) < NEARLY else "better" if change > 0 else "worse"


def most_changed(rows: list[CaseRow], most: int) -> list[CaseRow]:
    """At most `most` cases, those whose score changed most; up to half of them are held-out cases."""
    if len(rows) <= most:
        return rows
    ranked = sorted(rows, key=lambda row: -abs(row.change or 0.0))
    held_out = [row for row in ranked if row.is_held_out][: most // 2]
    training = [row for row in ranked if not row.is_held_out][: most - len(held_out)]
    return [*held_out, *training]
