"""Chooses the episodes of a large run that report.html holds.

In this order, until the page is full: held-out cases before and after, the first and the last steps, failures, the
groups with the highest, the lowest and the most different scores, and groups from evenly spread steps. Groups are not
split, as an advantage has no meaning without the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from statistics import fmean, pvariance

from aitrain.runs.rollout_index import IndexEntry
from aitrain.ui.episodes import grouped

MOST_EPISODES = 2_000
MOST_BYTES = 8_000_000
"""Maximum bytes of the records in the files; the page holds less of each."""
LARGEST = 400_000
"""Maximum bytes that one episode counts for, as a page shows only a part of a larger one."""

Group = list[int]


def choose(entries: Sequence[IndexEntry]) -> list[int]:
    """Numbers of the chosen episodes, in the order in which they were made."""
    chosen: set[int] = set()
    room = MOST_BYTES
    for group in chain.from_iterable(_wishes(grouped(entries, range(len(entries))), entries)):
        new = [number for number in group if number not in chosen]
        size = sum(min(entries[number].length, LARGEST) for number in new)
        if size <= room and len(chosen) + len(new) <= MOST_EPISODES:
            chosen.update(new)
            room -= size
    return sorted(chosen)


def _wishes(groups: list[Group], entries: Sequence[IndexEntry]) -> Iterator[Iterable[Group]]:
    training = [group for group in groups if not entries[group[0]].eval_phase]
    scored = [group for group in training if any(entries[number].score is not None for number in group)]
    by_mean = sorted(scored, key=lambda group: fmean(_scores(group, entries)))
    by_spread = sorted(scored, key=lambda group: pvariance(_scores(group, entries)))
    yield _before_and_after(groups, entries)
    yield _of_steps(training, entries, 4)
    yield spread([group for group in groups if any(entries[number].failure for number in group)], 40)
    yield from (by_mean[-12:], by_mean[:12], by_spread[-12:])
    yield spread(training, 60)
    yield spread(groups, MOST_EPISODES)


def _scores(group: Group, entries: Sequence[IndexEntry]) -> list[float]:
    return [score for number in group if (score := entries[number].score) is not None]


def _before_and_after(groups: list[Group], entries: Sequence[IndexEntry]) -> Iterator[Group]:
    """Episodes before and after training: sampled ones of up to 60 evenly spread cases, then greedy ones of 30."""
    by_case: dict[tuple[bool, str], Group] = {}
    for group in groups:
        entry = entries[group[0]]
        if entry.eval_phase.startswith(("before", "after")):
            by_case.setdefault((entry.eval_phase.endswith("greedy"), entry.case), []).extend(group)
    yield from spread([both for (is_greedy, _), both in by_case.items() if not is_greedy], 60)
    yield from spread([both for (is_greedy, _), both in by_case.items() if is_greedy], 30)


def _of_steps(training: list[Group], entries: Sequence[IndexEntry], most: int) -> Iterator[Group]:
    """A few groups of each of the first and of the last steps."""
    steps: dict[int, list[Group]] = {}
    for group in training:
        steps.setdefault(entries[group[0]].step, []).append(group)
    ordered = sorted(steps)
    for step in dict.fromkeys([*ordered[:1], *ordered[-1:], *ordered[1:3], *ordered[-3:-1]]):
        yield from spread(steps[step], most)


def spread(items: Sequence[Group], most: int) -> list[Group]:
    """At most `most` groups, evenly spread, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]
