"""Options of the environment."""

from collections.abc import Iterable
from typing import ClassVar, Literal

from aitrain.options.section import Options, ResumeSafe, Rule
from aitrain.options.value_types import (
    RAY_WORKERS,
    EnvWorkers,
    Fraction,
    JsonObjectOption,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ScoreRange,
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


class EnvironmentOptions(Options):
    """Which environment is loaded, and how its code is called."""

    section = "Environment"
    replaces: ClassVar = {"rl_env": ("rl_env_module", "rl_env_class"), "rl_env_module": ("rl_env",)}

    rl_env: ResumeSafe[str | None] = None
    """Environment, as path/to/file.py:Class, package.module:Class, envs.gsm8k, NAME:ID of an adapter, or the URL of
    aitrain env serve; several URLs of one environment with commas."""
    rl_env_module: ResumeSafe[str | None] = None
    """Module of the environment class."""
    rl_env_class: ResumeSafe[str | None] = None
    """Name of the environment class; unset: the only class of the module that has build_dataset."""
    rl_env_config: ResumeSafe[JsonObjectOption | None] = None
    """Keyword arguments of the environment's constructor: a JSON object, or @file.json."""
    rl_env_workers: ResumeSafe[EnvWorkers | None] = None
    """Concurrent calls to the environment; unset: 64 (in processes: 4 for each CPU core; to servers: 256); ray:64: in a
    Ray cluster."""
    rl_env_episodes: ResumeSafe[PositiveInt | None] = None
    """Concurrent episodes of the environment in each process; unset: all of a batch."""
    rl_env_isolation: ResumeSafe[Literal["thread", "process"]] = "thread"
    """Where the environment's code runs: threads, or processes for code that hangs, crashes or holds the GIL."""
    rl_env_timeout: ResumeSafe[PositiveFloat] = 60.0
    """Deadline in seconds of one call to the environment; the model's own time does not count."""
    rl_env_retries: ResumeSafe[NonNegativeInt] = 0
    """How often a failed start or score is tried again (steps and tools change the episode, and are not)."""
    rl_score_range: ScoreRange = "0,1"
    """Lowest and highest score that an environment may return, as in -1,1; any: all finite numbers."""
    rl_max_failed: ResumeSafe[Fraction] = 0.5
    """Fraction of failed episodes in a batch that is too high; three such batches in a row end the run."""

    rl_check: ResumeSafe[bool] = True
    """Check the environment with scripted answers before training, for at most 5 seconds; see aitrain env check."""

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

    def rules(self) -> Iterable[Rule]:
        """One environment, named once."""
        named = (self.rl_env or "").partition(":")[2]
        is_served = (self.rl_env or "").startswith(("http://", "https://"))
        return [
            (
                self.rl_env is not None and self.rl_env_module is not None,
                "rl_env and rl_env_module both name an environment: give one of them",
            ),
            (
                self.rl_env_class is not None and self.rl_env is None and self.rl_env_module is None,
                f"rl_env_class: the module of {self.rl_env_class} is missing: add --rl-env-module",
            ),
            (
                self.rl_env_class is not None and named not in ("", self.rl_env_class),
                f"rl_env: {self.rl_env} and rl_env_class: {self.rl_env_class} name two classes: give one of them",
            ),
            (
                self.rl_env_isolation == "process" and is_served,
                "rl_env_isolation: the environment runs where its server is: give the option to aitrain env serve",
            ),
            (
                self.is_env_on_ray and is_served,
                "rl_env_workers: the environment runs where its server is: give a number without ray",
            ),
        ]
