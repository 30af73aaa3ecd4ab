"""Tasks of Inspect with their solvers, tools and scorers: `--rl-env inspect:my_task.py@task`, or `package/task`.

Settings: size, seed, system and score_range as in `settings.py`; `model_roles`; and the arguments of the task (in
`task` if one has the name of a setting).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

from aitrain.environment.adapters.settings import JsonMapping, JsonObject, choose, requires
from aitrain.environment.contract import Score
from aitrain.environment.endpoint import Endpoint
from aitrain.environment.user_modules import source_files
from aitrain.errors import ConfigError

VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""What Inspect counts for scores that are words: correct, partial, incorrect, no answer."""


class InspectTask:
    """The samples of a task. Its solvers run as they are and ask the policy, which is trained on what it answers in the
    sample's own conversation; its scorers give the score, the mean of them if there are several."""

    def __init__(
        self,
        id: str,
        /,
        *,
        size: int | None = None,
        seed: int | None = None,
        system: str | None = None,
        score_range: object = "0,1",
        model_roles: JsonMapping | None = None,
        task: JsonMapping | None = None,
        **arguments: Any,
    ) -> None:
        from inspect_ai._eval.loader import load_tasks

        self.requirements = requires(score_range, "inspect")
        self.size, self.seed, self.system, self.model_roles = size, seed, system, dict(model_roles or {})
        file, at, name = id.partition("@")
        if file.endswith(".py"):
            file = os.path.relpath(os.path.expanduser(file))
        found = load_tasks([file + at + name], {**arguments, **(task or {})})
        if len(found) != 1:
            raise ConfigError(f"rl_env: Inspect finds {len(found)} tasks named {id}: name one, as in file.py@task")
        self.task = found[0]
        self.source_files = source_files([(file, "")] if file.endswith(".py") else ())
        if not self.task.scorer:
            raise ConfigError(f"rl_env: the task {self.task.name} has no scorer, so its samples have no score")
        if self.task.sandbox is not None or any(sample.sandbox for sample in self.task.dataset):
            raise ConfigError(
                f"rl_env: the task {self.task.name} needs a sandbox, which this adapter does not start\n"
                "Use a task whose tools run in Python."
            )

    def build_dataset(self) -> list[JsonObject]:
        """A row for each sample, with the sample in it; the solvers ask first."""
        samples = choose(list(self.task.dataset), self.size, self.seed)
        ids = [sample.id if sample.id is not None else number for number, sample in enumerate(samples)]
        return [
            {"prompt": [], "case_idx": id, "sample": {**sample.model_dump(exclude_none=True), "id": id}}
            for id, sample in zip(ids, samples, strict=True)
        ]

    async def rollout(self, sample: JsonObject, endpoint: Endpoint) -> Score:
        """Run the task's solvers and scorers on a sample."""
        from inspect_ai.dataset import Sample

        from aitrain.environment.adapters.inspect_sample import run_sample

        values, untrained = await run_sample(
            self.task, Sample.model_validate(sample), endpoint, self.system, self.model_roles
        )
        return score_of(values, {"untrained_requests": float(untrained)})


def score_of(values: Mapping[str, object], metrics: Mapping[str, float]) -> Score:
    """The mean of the scorers' values, each of which is a metric too; values that are NaN are left out.

    Raises:
        ValueError: a value is no number and no word that counts as one.
    """
    parts = {name: _numbers(name, value) for name, value in values.items()}
    means = [mean for part in parts.values() if (mean := _mean(part.values())) is not None]
    named = {name: number for part in parts.values() for name, number in part.items()}
    return Score(_mean(means), {**named, **metrics})


def _mean(numbers: Iterable[float]) -> float | None:
    known = [number for number in numbers if not math.isnan(number)]
    return sum(known) / len(known) if known else None


def _numbers(name: str, value: object) -> dict[str, float]:
    """The numbers of a scorer's value by their names: one, or those of a dict or a list."""
    if isinstance(value, Mapping):
        return {key: number for part, one in value.items() for key, number in _numbers(f"{name}/{part}", one).items()}
    if isinstance(value, (list, tuple)):
        return _numbers(name, dict(enumerate(value)))
    if isinstance(value, str):
        value = VALUES.get(value, VALUES.get(value.lower(), value))
    try:
        return {name: float(value)}  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"the scorer {name} gave {str(value)[:60]!r}, which is not a number") from None
