"""Tasks of Inspect with their solvers, tools and scorers: `--rl-env inspect:my_task.py@task`, or `package/task`.

Settings: those of `settings.py`, and `model_roles`. The arguments are those of the task.
"""

import copy
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

from aitrain.environment.adapters.settings import JsonMapping, JsonObject, PackageEnvironment, prompted
from aitrain.environment.contract import Score, as_messages
from aitrain.environment.endpoint import Endpoint
from aitrain.environment.user_modules import source_files
from aitrain.errors import ConfigError

VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
"""What Inspect counts for scores that are words: correct, partial, incorrect, no answer."""
UNUSED_LIMITS = ("token_limit", "cost_limit", "time_limit", "working_limit")
"""Limits of a task on time, in which waiting for the policy would count, and on what the policy does not tell."""
NO_SERVERS: Any = {"acp_server": False, "ctl_server": False}


@dataclass(eq=False, kw_only=True)
class InspectTask(PackageEnvironment):
    """The samples of a task. Its solvers run as they are and ask the policy, which is trained on what it answers in the
    sample's own conversation; its scorers give the score, the mean of them if there are several."""

    score_range: Any = "0,1"
    model_roles: JsonMapping = field(default_factory=dict)

    def __post_init__(self) -> None:
        import inspect_ai
        from inspect_ai._eval.loader import load_tasks

        super().__post_init__()
        file, at, name = self.id.partition("@")
        if file.endswith(".py"):
            file = os.path.relpath(os.path.expanduser(file))
        found = load_tasks([file + at + name], dict(self.arguments))
        if len(found) != 1:
            raise ConfigError(f"rl_env: Inspect finds {len(found)} tasks named {self.id}: name one, as in file.py@task")
        self.task = found[0]
        self.source_files = source_files([(file, "")] if file.endswith(".py") else ())
        if not self.task.scorer:
            raise ConfigError(f"rl_env: the task {self.task.name} has no scorer, so its samples have no score")
        if self.task.sandbox is not None or any(sample.sandbox for sample in self.task.dataset):
            raise ConfigError(
                f"rl_env: the task {self.task.name} needs a sandbox, which this adapter does not start\n"
                "Use a task whose tools run in Python."
            )
        for limit in UNUSED_LIMITS:
            setattr(self.task, limit, None)
        # the first eval imports for seconds: here, so that each process of an episode has that already
        with TemporaryDirectory() as folder:
            inspect_ai.eval(inspect_ai.Task(), model="mockllm/model", display="none", log_dir=folder, **NO_SERVERS)

    def build_dataset(self) -> list[JsonObject]:
        """A row for each sample, with the sample in it; the solvers ask first."""
        rows = []
        for number, sample in enumerate(self.choose(self.task.dataset)):
            given = {"id": number, **sample.model_dump(exclude_none=True)}
            if self.system is not None:
                given["input"] = prompted(as_messages(given["input"]), self.system)
            rows.append({"prompt": [], "case_idx": given["id"], "sample": given})
        return rows

    async def rollout(self, sample: JsonObject, endpoint: Endpoint) -> Score:
        """An eval of one sample: the task's solvers, then its scorers."""
        from inspect_ai import eval_async
        from inspect_ai.dataset import MemoryDataset, Sample
        from inspect_ai.model import GenerateConfig, Model

        from aitrain.environment.adapters.inspect_model import PolicyModel

        task, policy = copy.copy(self.task), PolicyModel(endpoint)
        task.dataset = MemoryDataset([Sample.model_validate(sample)])
        with TemporaryDirectory() as folder:
            (log,) = await eval_async(
                task,
                model=Model(policy, GenerateConfig()),
                model_roles=dict(self.model_roles),
                epochs=1,
                debug_errors=True,  # they are raised
                log_dir=folder,
                log_realtime=False,
                **NO_SERVERS,
            )
            scores = log.samples[0].scores or {}
        values = {name: score.value for name, score in scores.items()}
        return score_of(values, {"untrained_requests": float(policy.untrained)})


def score_of(values: Mapping[str, object], metrics: Mapping[str, float]) -> Score:
    """The mean of the scorers' values, each of which is a metric too; values that are NaN are left out.

    Raises:
        ValueError: a value is no number and no word that counts as one.
    """
    parts = [_numbers(name, value) for name, value in values.items()]
    named = {name: number for part in parts for name, number in part.items()}
    return Score(_mean(_mean(part.values()) for part in parts), {**named, **metrics})


def _mean(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None and not math.isnan(number)]
    return sum(known) / len(known) if known else None


def _numbers(name: str, value: object) -> dict[str, float]:
    """The numbers of a scorer's value by their names: one, or those of a dict or a list."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return {key: number for part, one in value.items() for key, number in _numbers(f"{name}/{part}", one).items()}
    if isinstance(value, str):
        value = VALUES.get(value, VALUES.get(value.lower(), value))
    try:
        return {name: float(value)}  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"the scorer {name} gave {str(value)[:60]!r}, which is not a number") from None
