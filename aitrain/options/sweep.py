"""`SweepConfig`, the file that `aitrain sweep` reads: fixed options, searched options, and how they are searched."""

from collections.abc import Iterator
from typing import Literal

from aitrain.options.section import Options
from aitrain.options.value_types import PositiveInt, Seed, Table

PER_TRIAL = ("project_name", "output_dir", "resume_from_checkpoint", "resume_anyway", "push_to_hub")
"""Options of a run that a sweep sets for each trial."""
SAME_FOR_ALL = ("eval_cases", "eval_samples", "eval_strategy", "eval_steps", "save_best", "rl_env_weights")
"""Options that cannot be searched: trials are compared by what these measure. `save_best` reports other cases."""
RESHAPING = ("rl_temperature", "rl_top_k", "rl_top_p")
"""Options that change how held-out completions are sampled."""


class SweepConfig(Options):
    """A sweep. Unknown names and invalid values raise ConfigError."""

    section = "Sweep"

    project_name: str = "sweep"
    """Name of the sweep and of its folder."""
    output_dir: str = "runs"
    """Folder in which the sweep's folder is made."""
    options: Table = {}  # noqa: RUF012  pydantic copies defaults
    """Options of `aitrain grpo` that are the same for all trials."""
    search: Table = {}  # noqa: RUF012
    """Options of `aitrain grpo` that are searched: a list of values, or a range."""
    trials: PositiveInt | None = None
    """Number of trials; unset: 10, or all combinations of a grid."""
    objective: Literal["sampled", "greedy"] = "sampled"
    """Held-out score after the training by which trials are compared: of sampled or of greedy completions."""
    sampler: Literal["tpe", "grid"] = "tpe"
    """How the values of a trial are chosen: by Optuna's tree-structured Parzen estimator, or all combinations."""
    seed: Seed = 42
    """Seed of the sampler; the seed of the trials is the option `seed` under `options`."""

    def rules(self) -> Iterator[str]:
        """Fixed and searched options, by their names."""
        if not self.search:
            yield "search: name an option to search, like `lr: {low: 1e-6, high: 1e-4, log: true}`"
        for name in self.search:
            if name in self.options:
                yield f"search: {name} is also under options\nLeave it in one of the two."
            if name in SAME_FOR_ALL:
                yield f"search: {name} must be the same for all trials, as it measures them\nSet it under options."
            if name in RESHAPING and self.objective == "sampled":
                yield f"search: {name} changes the scores of sampled completions as well\nAdd `objective: greedy`."
        if self.sampler == "grid" and not all(isinstance(given, list) for given in self.search.values()):
            yield "sampler: a grid has lists of values\nWrite the values, or use the sampler tpe."
        for name in PER_TRIAL:
            if name in self.options or name in self.search:
                yield f"{name}: a sweep sets it for each trial\nRemove it under options and search."
        if self.options.get("eval_cases") == 0:
            yield "eval_cases: trials are compared by held-out scores: it must be above 0"
