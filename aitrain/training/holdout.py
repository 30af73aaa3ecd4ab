"""Chooses the held-out rows at random by a seed; rows that look the same to the model stay on the same side."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HoldoutRows:
    """Row indices: held out for evaluation, and left out of training because the model sees the same prompt there."""

    held_out: list[int]
    left_out: list[int]


def hold_out(keys: Sequence[Hashable], count: int, max_rows: int, seed: int) -> HoldoutRows:
    """Hold out about `count` rows; rows with the same key stay together, so that at least two keys are needed.

    Takes whole groups of rows with the same key in random order as long as they fit. If that yields less than half of
    `count` because the groups are large, the smallest remaining group is removed from training, and as many of its rows
    as are missing are held out. Removes at most `max_rows` rows from training.
    """
    groups: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    held: list[int] = []
    rest: list[list[int]] = []
    for group in _drawn(list(groups.values()), count, seed):
        if len(held) + len(group) <= count:
            held += group
        else:
            rest.append(group)
    smallest = min(rest, key=len, default=[])
    if 2 * len(held) < count and len(held) + len(smallest) <= max_rows and len(rest) > 1:
        missing = count - len(held)
        held += smallest[:missing]
        return HoldoutRows(sorted(held), smallest[missing:])
    return HoldoutRows(sorted(held), [])


def _drawn(groups: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """All groups in random order. The first `count` are the ones that `random.sample` draws."""
    rng = random.Random(seed)
    places = rng.sample(range(len(groups)), min(count, len(groups)))
    others = sorted(set(range(len(groups))) - set(places))
    rng.shuffle(others)
    return [groups[place] for place in (*places, *others)]
