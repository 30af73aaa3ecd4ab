"""Options of the environment, or of several."""

import re
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field

from aitrain.errors import did_you_mean
from aitrain.options.section import Options, ResumeSafe
from aitrain.options.value_types import (
    RAY_WORKERS,
    Environments,
    EnvWorkers,
    Fraction,
    PositiveFloat,
    PositiveInt,
    ScoreRange,
    Table,
    Weights,
    score_bounds,
)

DECLARED_OPTIONS = {
    "isolation": "rl_env_isolation",
    "max_turns": "rl_max_turns",
    "max_new_tokens": "rl_max_new_tokens",
    "score_range": "rl_score_range",
    "episodes_at_once": "rl_env_episodes",
}
"""Options that an environment may declare in its `requirements`, by their names there; one that is given wins."""

_NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)=(.+)")
"""NAME=PLACE of one environment of several; a URL with a query is not one."""
_URLS = ("http://", "https://")


class EnvironmentOptions(Options):
    """Which environment is loaded, and how its code is called."""

    section = "Environment"

    rl_env: ResumeSafe[Environments | None] = None
    """Environment, as path/to/file.py:Class, package.module:Class, envs.gsm8k, NAME:ID of an adapter, or the URL of
    aitrain env serve; several URLs of one environment with commas. Repeatable, to train on several environments:
    NAME=PLACE."""
    rl_env_weights: Weights | None = None
    """Shares of the environments in a batch, as in 2,1, if several --rl-env are given; unset: equal ones."""
    rl_env_module: ResumeSafe[str | None] = None
    """Module of the environment class."""
    rl_env_class: ResumeSafe[str | None] = None
    """Name of the environment class; unset: the only class of the module that has build_dataset."""
    rl_env_config: ResumeSafe[Table] = Field(default={})
    """Keyword arguments of the environment's constructor: a JSON object; with several environments, those of
    each by its name."""
    rl_env_workers: ResumeSafe[EnvWorkers | None] = None
    """Concurrent calls to the environment; unset: 64 (in processes: 4 for each CPU core; to servers: 256); ray:64: in a
    Ray cluster."""
    rl_env_episodes: ResumeSafe[PositiveInt | None] = None
    """Concurrent episodes of the environment in each process; unset: all of a batch."""
    rl_env_isolation: ResumeSafe[Literal["thread", "process"]] = "thread"
    """Where the environment's code runs: threads, or processes for code that hangs, crashes or holds the GIL."""
    rl_env_timeout: ResumeSafe[PositiveFloat] = 60.0
    """Deadline in seconds of one call to the environment; the model's own time does not count."""
    rl_score_range: ScoreRange = "0,1"
    """Lowest and highest score that an environment may return, as in -1,1; any: all numbers up to 1e18."""
    rl_max_failed: ResumeSafe[Fraction] = 0.5
    """Fraction of failed episodes in a batch that is too high; three such batches in a row end the run."""

    rl_check: ResumeSafe[bool] = True
    """Check the environment with scripted answers before training, for at most 10 seconds; see aitrain env check."""

    @property
    def environments(self) -> dict[str, Self]:
        """The options of each environment by its name, as if it were the only one; the name of an only one is empty."""
        if not isinstance(self.rl_env, list):
            return {"": self}
        found = dict[str, Self]()
        for name, place in map(named_place, self.rl_env):
            own = {"rl_env": place, "rl_env_weights": None, "rl_env_config": self.rl_env_config.get(name, {})}
            if place.startswith(_URLS):
                own["rl_env_isolation"] = "thread"  # it runs where its server is
            found[name] = self.model_copy(update=own)
        return found

    @property
    def env_shares(self) -> dict[str, float]:
        """The share of each environment in a batch and in the held-out score, of 1."""
        names = list(self.environments)
        weights = self.rl_env_weights or [1.0] * len(names)
        return {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)}

    @property
    def env_place(self) -> str:
        """Where the only environment is; empty without one, and with several."""
        return self.rl_env if isinstance(self.rl_env, str) else ""

    @property
    def env_calls(self) -> int | None:
        """The number of rl_env_workers."""
        return None if self.rl_env_workers is None else int(str(self.rl_env_workers).removeprefix(RAY_WORKERS))

    @property
    def is_env_on_ray(self) -> bool:
        """Whether the environment runs in the actors of a Ray cluster."""
        return str(self.rl_env_workers).startswith(RAY_WORKERS)

    @property
    def score_bounds(self) -> tuple[float, float]:
        """The lowest and the highest score of rl_score_range; infinite ones for any."""
        return score_bounds(self.rl_score_range) or (0.0, 1.0)  # the option is checked: never None

    def rules(self) -> Iterator[str]:
        """One environment, named once, or several."""
        if self.rl_env is not None and self.rl_env_module is not None:
            yield "rl_env and rl_env_module both name an environment: give one of them"
        if self.rl_env_class is not None and self.rl_env_module is None:
            yield "rl_env_class: it is a class of rl_env_module; with rl_env, name it there, as in file.py:Class"
        if isinstance(self.rl_env, list):
            yield from self._rules_of_several(self.rl_env)
            return
        if self.rl_env_weights is not None:
            yield "rl_env_weights: there is one environment: leave the weights out"
        is_served = self.env_place.startswith(_URLS)
        if is_served and self.rl_env_isolation == "process":
            yield "rl_env_isolation: the environment runs where its server is: give the option to aitrain env serve"
        if is_served and self.is_env_on_ray:
            yield "rl_env_workers: the environment runs where its server is: give a number without ray"

    def _rules_of_several(self, places: list[str]) -> Iterator[str]:
        names = [name for name, _ in map(named_place, places)]
        if "" in names or len(set(names)) < len(names):
            yield f"rl_env: each of several environments has its own name, as in NAME={named_place(places[-1])[1]}"
        if self.rl_env_weights is not None and len(self.rl_env_weights) != len(names):
            yield f"rl_env_weights: {len(self.rl_env_weights)} weights for {len(names)} environments"
        if self.is_env_on_ray:
            yield "rl_env_workers: several environments cannot run on Ray: give a number without ray"
        for name, keywords in self.rl_env_config.items():
            if name not in names:
                yield (
                    f"rl_env_config: there is no environment {name}.{did_you_mean(name, names)}\nWith several, it has"
                    f' the keywords by name, as in {{"{names[0]}": {{"size": 3}}}}. It is one of {", ".join(names)}.'
                )
            if not isinstance(keywords, dict):
                yield f"rl_env_config: the keywords of {name} must be a JSON object"


def named_place(given: str) -> tuple[str, str]:
    """Name and place of one environment of several; the name is empty where none is given."""
    named = _NAMED.fullmatch(given)
    return (named[1], named[2]) if named else ("", given)
