"""Gives each episode an environment of its own, as far as episodes change it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from aitrain.environment.object_walk import Walk


@dataclass(frozen=True)
class CopyPlan:
    """How each episode gets an environment of its own: the named attributes are copied, the others are shared."""

    own: frozenset[str] = frozenset()

    def copy_of(self, environment: object) -> object:
        """Copy the environment for one episode.

        Raises:
            Exception: the environment cannot be copied.
        """
        kind, attributes = type(environment), vars(environment)
        copied = object.__new__(kind)
        memo = {id(value): value for name, value in attributes.items() if name not in self.own}
        memo[id(environment)] = copied
        for name, value in attributes.items():
            vars(copied)[name] = copy.deepcopy(value, memo) if name in self.own else value
        return copied

    @classmethod
    def for_changes(cls, environment: Any, changed: list[object]) -> CopyPlan:
        """The plan that copies what calls changed, and what leads there.

        Raises:
            ValueError: a copy would not separate episodes, for the reason of the message.
        """
        for name in ("__slots__", "__del__"):
            if any(name in vars(owner) for owner in type(environment).__mro__[:-1]):
                raise ValueError(f"it has {name}")
        changes_itself = any(item is environment or item is vars(environment) for item in changed)
        targets = [item for item in changed if item is not vars(environment)] + [environment] * changes_itself
        own, below = set[str](), set[int]()
        for name, value in vars(environment).items():
            walk = Walk([value], without=[vars(environment)], through_code=False)
            own |= {name} if any(item in walk for item in targets) else set()
            below |= set(walk.seen)
        if not all(item is environment or id(item) in below for item in targets):
            raise ValueError("it is not below the environment")
        plan = cls(frozenset(own))
        try:
            copied = Walk(vars(plan.copy_of(environment)).values(), through_code=False)
        except Exception as error:
            raise ValueError(" ".join(f"{type(error).__name__}: {error}".split())[:100]) from error
        if any(item in copied for item in targets):
            raise ValueError("a copy of the environment still refers to it")
        return plan
