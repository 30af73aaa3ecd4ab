"""`aitrain grpo`: train a model on an environment. Its flags are the options of `TrainConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aitrain.cli.flags import (
    AsEvents,
    ConfigFile,
    Debug,
    DryRun,
    Flag,
    OptionsOnly,
    Quiet,
    Verbose,
    Verbosity,
    given_flags,
    with_options,
)
from aitrain.errors import AitrainError, ConfigError
from aitrain.options.run import NEWEST
from aitrain.options.train import TrainConfig

if TYPE_CHECKING:
    from aitrain.launch.nodes import NodeGroup


@with_options(TrainConfig)
def grpo(
    config: ConfigFile = None,
    dry_run: DryRun = False,
    options_only: OptionsOnly = False,
    *,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume from the newest complete checkpoint: --resume-from-checkpoint auto."),
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    as_json: AsEvents = False,
    **flags: Flag,
) -> int:
    """Train a model with GRPO on your environment.

    aitrain grpo --model tiny --rl-env path/to/file.py:Class

    First steps: aitrain demo, then aitrain env init.
    """
    options = train_options(config, flags, resume)
    return train(options, Verbosity(quiet, verbose, debug, as_json), dry_run, options_only)


def train_options(config: Path | None, flags: Mapping[str, Flag], resume: bool) -> TrainConfig:
    """The options of a file and of flags. With --resume, the config.yaml of a run is that of the run which it is in."""
    from aitrain.options.reading import place_of_run, resolve

    given = {**({"resume_from_checkpoint": "auto"} if resume else {}), **given_flags(flags)}
    place = place_of_run(config) if config and given.get("resume_from_checkpoint") in NEWEST else {}
    return resolve(TrainConfig, config, {**place, **given})


def train(options: TrainConfig, verbosity: Verbosity, dry_run: bool = False, options_only: bool = False) -> int:
    """Check the options, and train, or for a dry run show the plan; returns the exit code.

    Raises:
        AitrainError: an option is wrong, or the run failed.
    """
    from aitrain.launch.machines import launched_rank  # these here, because help needs none of them
    from aitrain.launch.preflight import check

    if options_only and not dry_run:
        raise ConfigError("--options-only: add --dry-run, or omit it to train")
    if dry_run:
        from aitrain.cli.plan import show_plan

        show_plan(check(options), options_only, verbosity.debug, verbosity.as_json)
        return 0
    if (rank := launched_rank()) is not None:
        from aitrain.cli.node_run import as_rank

        return as_rank(rank, options, partial(_train, verbosity))
    return _train(verbosity, options)


def _train(verbosity: Verbosity, options: TrainConfig, group: NodeGroup | None = None) -> int:
    from aitrain.launch.machines import find_nodes  # these here, because help needs none of them
    from aitrain.launch.preflight import check

    with ExitStack() as locks:
        try:
            plan = check(options, locks=locks)
        except AitrainError as error:
            with suppress(AitrainError):  # the refusal itself is said below
                if (nodes := find_nodes(options)) is not None:
                    from aitrain.cli.node_run import report_refusal

                    report_refusal(nodes, group, error)
            raise
        if plan.nodes is not None:
            from aitrain.cli.node_run import train_on

            return train_on(plan.nodes, plan, verbosity, options, group)
        from aitrain.cli.running import train_here

        return train_here(plan, verbosity, group)
