"""`SweepConfig`, the file that `aitrain sweep` reads: fixed options, searched options, and how they are searched."""

from collections.abc import Iterable
from typing import Literal

from aitrain.options.section import Options, ResumeSafe, Rule
from aitrain.options.value_types import NonNegativeInt, PositiveInt, ProjectName, Seed, Table

PER_TRIAL = {
    "project_name": "each trial has a name of its own. Name the sweep at the top of the file.",
    "output_dir": "trials are folders of the sweep's folder. Set output_dir at the top of the file.",
    "resume_from_checkpoint": "`aitrain sweep --resume` resumes the trials by itself.",
    "resume_anyway": "`aitrain sweep --resume` resumes the trials by itself.",
    "push_to_hub": "trials are not uploaded. Upload the best one afterwards.",
}
"""Options of a run that a sweep sets by itself, and what to do instead."""
SAME_FOR_ALL = ("eval_cases", "eval_samples", "eval_strategy", "eval_steps")
"""Options that cannot be searched: trials are compared by what these measure."""


class SweepConfig(Options):
    """A sweep. Unknown names and invalid values raise ConfigError."""

    section = "Sweep"
    file_flag = ""
    file_hint = "\nName the YAML file of a sweep, or the folder that aitrain sweep made."

    project_name: ResumeSafe[ProjectName] = "sweep"
    """Name of the sweep and of its folder."""
    output_dir: ResumeSafe[str] = "runs"
    """Folder in which the sweep's folder is made."""
    options: Table = {}  # noqa: RUF012  pydantic copies defaults
    """Options of `aitrain grpo` that are the same for all trials."""
    search: Table = {}  # noqa: RUF012
    """Options of `aitrain grpo` that are searched: a list of values, or a range."""
    trials: ResumeSafe[PositiveInt | None] = None
    """Number of trials; unset: 10, or all combinations of a grid."""
    objective: Literal["sampled", "greedy"] = "sampled"
    """Held-out score after the training by which trials are compared: of sampled or of greedy completions."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether a higher or a lower score is better."""
    sampler: ResumeSafe[Literal["tpe", "random", "grid"]] = "tpe"
    """How the values of a trial are chosen: by Optuna's tree-structured Parzen estimator, at random, or all
    combinations."""
    pruner: ResumeSafe[Literal["none", "median", "halving"]] = "none"
    """When a trial is ended early, by its held-out scores during training: never, below the median of the others at
    the same step, or by successive halving."""
    prune_after_trials: ResumeSafe[NonNegativeInt] = 4
    """Trials that must have finished before the median pruner ends one."""
    prune_after_step: ResumeSafe[NonNegativeInt] = 0
    """Step before which the median pruner ends no trial."""
    seed: ResumeSafe[Seed] = 42
    """Seed of the sampler; the seed of the trials is the option `seed` under `options`."""

    def rules(self) -> Iterable[Rule]:
        """Fixed and searched options, by their names."""
        both = next((name for name in _names(self.search) if name in _names(self.options)), "")
        own = next((name for name in PER_TRIAL if name in self.options or name in self.search), "")
        same = next((name for name in SAME_FOR_ALL if name in self.search), "")
        strategy = self.options.get("eval_strategy", "epoch")
        return [
            (not self.search, "search: name an option to search, like `lr: {low: 1e-6, high: 1e-4, log: true}`"),
            (bool(both), f"search: {both} is also under options\nLeave it in one of the two."),
            (bool(own), f"{own}: {PER_TRIAL.get(own)}"),
            (bool(same), f"search: {same} must be the same for all trials, as it measures them\nSet it under options."),
            (
                self.options.get("eval_cases") == 0,
                "eval_cases: trials are compared by their scores on held-out cases: it must be above 0",
            ),
            (
                self.pruner != "none" and strategy in ("no", False),
                f"pruner: {self.pruner} needs held-out scores during training\nSet eval_strategy under options.",
            ),
        ]  # fmt: skip


def _names(options: dict[str, object]) -> list[str]:
    """Names of options, with `trl.KEY` for the fields of TRL."""
    fields = options.get("trl")
    names = [name for name in options if name != "trl"]
    return names + ([f"trl.{key}" for key in fields] if isinstance(fields, dict) else [])
