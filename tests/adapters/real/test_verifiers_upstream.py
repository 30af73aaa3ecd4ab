"""What the adapters use of verifiers' private API, and what has to hold of it."""

from __future__ import annotations

import asyncio
import inspect

from tests.adapters.real.conftest import in_environment


@in_environment("older")
def test_a_rubric_of_verifiers_03_tells_the_weights_of_its_functions() -> None:
    import verifiers as vf

    rubric = vf.Rubric(funcs=[lambda completion: 1.0, lambda completion: 0.0], weights=[1.0, 0.5])
    assert rubric._get_reward_weights() == [1.0, 0.5]


@in_environment("older")
def test_an_environment_of_verifiers_03_has_a_teardown_without_arguments() -> None:
    import verifiers as vf

    assert inspect.iscoroutinefunction(vf.Environment._teardown)
    assert list(inspect.signature(vf.Environment._teardown).parameters) == ["self"]


@in_environment("newest")
def test_a_reward_function_of_verifiers_04_holds_its_weight() -> None:
    import verifiers.v1 as vf

    @vf.reward(weight=0.5)
    async def half(self: object) -> float:
        return 1.0

    assert half._vf_weight == 0.5
    assert asyncio.iscoroutinefunction(half)
