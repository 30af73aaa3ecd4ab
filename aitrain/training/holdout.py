"""Which rows of a dataset are held out: chosen at random by the seed, and never so that two rows that look the same to
the model are on both sides."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HoldoutRows:
    """Places in the dataset: what is held out, and what is left out of the training because it looks like that."""

    held_out: list[int]
    left_out: list[int]


def hold_out(keys: Sequence[Hashable], count: int, most: int, seed: int) -> HoldoutRows:
    """About `count` of the rows; rows with the same key stay together, so at least two keys are needed.

    Whole groups of rows are taken, in an order drawn by the seed, as long as they fit. Where that comes to less than
    half of `count`, because the groups are large, one more group is taken out of the training, the smallest one, and as
    many of its rows are held out as are missing. At most `most` rows are taken out of the training in all.
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
    if 2 * len(held) < count and len(held) + len(smallest) <= most and len(rest) > 1:
        missing = count - len(held)
        held += smallest[:missing]
        return HoldoutRows(sorted(held), smallest[missing:])
    return HoldoutRows(sorted(held), [])


def _drawn(groups: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """All of them in a random order. The first `count` are drawn as `count` rows without a repeat would be."""
    rng = random.Random(seed)
    places = rng.sample(range(len(groups)), min(count, len(groups)))
    others = sorted(set(range(len(groups))) - set(places))
    rng.shuffle(others)
    return [groups[place] for place in (*places, *others)]
