"""A sweep that passed its checks: the options of every trial are known to be valid before the first one starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aitrain.errors import ConfigError
from aitrain.launch.preflight import check
from aitrain.launch.search_space import MOST_COMBINATIONS, SearchSpace, in_our_form, read_space, with_values
from aitrain.options.option import options_of
from aitrain.options.other_names import unknown_option
from aitrain.options.reading import resolve
from aitrain.options.sweep import SweepConfig
from aitrain.options.train import TrainConfig
from aitrain.options.yaml_text import write_yaml
from aitrain.packages import installed
from aitrain.runs.run_folder import make_unused, to_json_object, write_text
from aitrain.runs.sweep_record import SweepRecord, Trial

SWEEP_YAML = "sweep.yaml"
"""The file of the sweep in its folder, with all of its options."""
USUAL_TRIALS = 10
RESHAPING = ("rl_temperature", "rl_top_k", "rl_top_p", "rl_min_p", "rl_repetition_penalty")
"""Options that change how held-out completions are sampled."""


@dataclass(frozen=True)
class SweepPlan:
    """A checked sweep."""

    config: SweepConfig
    space: SearchSpace
    notes: tuple[str, ...] = ()
    """Notes for the user before the first trial."""

    @property
    def trials(self) -> int:
        """Number of trials: at most the number of combinations."""
        size = self.space.size
        wanted = self.config.trials or (size if self.config.sampler == "grid" and size else USUAL_TRIALS)
        return min(wanted, size or wanted)

    @property
    def wanted_folder(self) -> Path:
        """Folder of the sweep, before a number is added to its name."""
        return Path(os.path.expanduser(self.config.output_dir)) / self.config.project_name

    def trial_config(self, trial: Trial, folder: Path, **more: object) -> TrainConfig:
        """The options of a trial's run.

        Raises:
            ConfigError: they do not go together.
        """
        own = {"output_dir": str(folder), "project_name": trial.name}
        return resolve(TrainConfig, None, {**with_values(self.config.options, trial.values), **own, **more})

    def open_folder(self) -> SweepRecord:
        """Make the sweep's folder, with `-2` at its end if the name is taken, and write the sweep's options into it."""
        parent = self.wanted_folder.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = make_unused(self.wanted_folder)
        except OSError as error:
            raise ConfigError(f"output_dir: cannot make a folder in {parent}: {error.strerror}") from None
        named = self.config.model_copy(update={"project_name": folder.name}).written()
        write_text(folder / SWEEP_YAML, write_yaml(named))
        record = SweepRecord(folder, to_json_object(named), self.trials)
        record.write()
        return record

    def resumed(self) -> SweepRecord:
        """The sweep in the folder, with the options of this plan, of which some may be new.

        Raises:
            ConfigError: there is none, or it is another sweep.
        """
        record = SweepRecord.read(self.wanted_folder)
        now = to_json_object(self.config.written())
        safe = {option.name for option in options_of(SweepConfig) if option.resume_safe}
        changes = [name for name in now if name not in safe and now[name] != record.config.get(name)]
        if changes:
            raise ConfigError(
                f"--resume: {', '.join(changes)} changed since the sweep in {record.folder} began\n"
                "Restore what it had (its sweep.yaml), or give the new sweep another project_name."
            )
        record.config, record.planned = now, max(self.trials, len(record.trials))
        return record


def read_sweep(file: Path, flags: Mapping[str, object]) -> SweepPlan:
    """Read the file of a sweep and check all of it.

    Raises:
        ConfigError: the sweep cannot work.
        EnvironmentFailed: the environment's file is not valid Python.
    """
    config = resolve(SweepConfig, file, flags)
    for name in config.options:
        if name not in TrainConfig.model_fields:
            raise ConfigError(unknown_option(name, TrainConfig.model_fields, f" (in options of {file})"))
    config = config.model_copy(update={"search": in_our_form(config.search)})
    plan = SweepPlan(config, read_space(config.search))
    endless = next((option.name for option in plan.space.options if option.count is None), None)
    if config.sampler == "grid" and endless is not None:
        raise ConfigError(
            f"sampler: a grid needs finitely many values, and {endless} is a range\nGive it a step or a list of values."
        )
    if config.sampler == "grid" and (plan.space.size or 0) > MOST_COMBINATIONS:
        raise ConfigError(
            f"sampler: a grid of {plan.space.size:,} combinations is too large: at most {MOST_COMBINATIONS:,}\n"
            "Search fewer values, or use the sampler tpe or random."
        )
    if installed("optuna") is None:
        raise ConfigError('aitrain sweep: Optuna is not installed\nInstall it with: pip install "aitrain[sweep]"')
    return SweepPlan(config, plan.space, _check_trials(plan))


def _check_trials(plan: SweepPlan) -> tuple[str, ...]:
    """Check runs with the values of the search space; returns their notes and those of the sweep."""
    names = [option.name for option in plan.space.options]
    notes: dict[str, None] = {}
    if reshaping := [name for name in names if name in RESHAPING] if plan.config.objective == "sampled" else []:
        notes[
            f"{', '.join(reshaping)}: changes how held-out completions are sampled as well, so trials differ by it even"
            " without training. Compare them with `objective: greedy`."
        ] = None
    if "seed" in names:
        notes["seed: changes which cases are held out, unless the environment has build_eval_dataset."] = None
    seen = set[str]()
    for values in plan.space.probes():
        if (key := repr(values)) in seen:
            continue
        seen.add(key)
        try:
            run = check(plan.trial_config(Trial(0, values), plan.wanted_folder))
        except ConfigError as error:
            tried = ", ".join(f"{name}: {value}" for name, value in values.items())
            error.args = (f"{error}\nThat is the trial with {tried}",)
            raise
        notes |= dict.fromkeys(run.notes)
    return tuple(notes)
