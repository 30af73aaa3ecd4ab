"""The order of the cases of several environments."""

from __future__ import annotations

import random
from collections import Counter

from aitrain.training.case_order import MixedOrder, UniformOrder

GROUPS = 6
SIZES = {"a": 10, "b": 7, "c": 5}


def order(weights: list[float]) -> MixedOrder:
    made = {name: UniformOrder(size, GROUPS, 3) for name, size in list(SIZES.items())[: len(weights)]}
    return MixedOrder(made, weights, GROUPS)


def env_of(case: int) -> str:
    return "a" if case < 10 else "b" if case < 17 else "c"


def test_each_environment_has_its_share_at_any_time_to_within_a_group() -> None:
    source = random.Random(0)
    for _ in range(30):
        weights = [source.choice([1, 2, 3, source.uniform(0.05, 9)]) for _ in range(source.choice([2, 3]))]
        drawn = [env_of(case) for index, mixed in enumerate([order(weights)] * 20) for case in mixed.batch(index)]
        counts = Counter[str]()
        for done, name in enumerate(drawn, 1):
            counts[name] += 1
            for other, weight in zip(SIZES, weights, strict=False):
                assert abs(counts[other] - done * weight / sum(weights)) < 1 + 1e-9


def test_each_environment_has_epochs_of_its_own() -> None:
    mixed = order([2, 1])
    of_a = [case for index in range(5) for case in mixed.batch(index) if env_of(case) == "a"]
    assert of_a == UniformOrder(10, 20, 3).batch(0)


def test_a_group_is_replaced_by_one_of_its_environment_where_that_has_another_case() -> None:
    mixed = order([2, 1])
    for in_use, expected in ([mixed.batch(0), ["b", "a", "b", "a"]], [range(10, 17), [None, "a", None, "a"]]):
        others = mixed.others([10, 0, 11, 1], in_use)
        assert [None if case is None else env_of(case) for case in others] == expected
        assert not set(others) & set(in_use)


def test_the_state_in_a_checkpoint_continues_the_order() -> None:
    mixed = order([2, 1, 1])
    for index in range(3):
        batch = mixed.batch(index)
        mixed.others(batch[:2], set(batch))
    later = order([2, 1, 1])
    later.restore(mixed.state())
    assert later.batch(3) == mixed.batch(3)
