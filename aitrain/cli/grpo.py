"""`aitrain grpo`: train a model on an environment. Its flags are the options of `TrainConfig`. `aitrain recipe`:
settings for known tasks, each with its environment, hardware and scores; `aitrain demo`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer

from aitrain.cli.flags import (
    AsEvents,
    AsJson,
    ConfigFile,
    Debug,
    DryRun,
    Flag,
    OptionsOnly,
    Quiet,
    SectionedCommand,
    Verbose,
    Verbosity,
    given_flags,
    group,
    print_json,
    with_options,
)
from aitrain.errors import AitrainError, ConfigError
from aitrain.options.reading import place_of_run, resolve
from aitrain.options.recipes import read_recipe, recipes
from aitrain.options.run import NEWEST
from aitrain.options.train import TrainConfig


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
    given = {**({"resume_from_checkpoint": "auto"} if resume else {}), **given_flags(flags)}
    place = place_of_run(config) if config and given.get("resume_from_checkpoint") in NEWEST else {}
    return resolve(TrainConfig, config, {**place, **given})


def train(options: TrainConfig, verbosity: Verbosity, dry_run: bool = False, options_only: bool = False) -> int:
    """Check the options, and train, or for a dry run show the plan; returns the exit code.

    Raises:
        AitrainError: an option is wrong, or the run failed.
    """
    from aitrain.launch.machines import find_nodes, launched_rank  # these here, because help needs none of them
    from aitrain.launch.preflight import check

    if options_only and not dry_run:
        raise ConfigError("--options-only: add --dry-run, or omit it to train")
    if dry_run:
        from aitrain.cli.plan import show_plan

        show_plan(check(options), options_only, verbosity.debug, verbosity.as_json)
        return 0
    group, rank = None, launched_rank()
    if rank is not None:
        from aitrain.launch.launched_ranks import open_group, restarted

        group, store = open_group(rank)
        options = restarted(options, rank, store)
    with ExitStack() as locks:
        try:
            plan = check(options, locks=locks)
        except AitrainError as error:
            with suppress(AitrainError):  # the refusal itself is said below
                if (nodes := find_nodes(options)) is not None:
                    from aitrain.cli.running import report_refusal

                    report_refusal(nodes, group, error)
            raise
        from aitrain.cli.running import train_here, train_on

        if plan.nodes is not None:
            return train_on(plan.nodes, plan, verbosity, options, group)
        return train_here(plan, verbosity, group)


# -- recipes

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the recipe.")]

recipe = group("Settings for known tasks, each with its environment, hardware and expected scores.")


@recipe.command("list", cls=SectionedCommand)
def recipe_list(*, as_json: AsJson = False) -> int:
    """List the recipes."""
    if as_json:
        print_json([one.document() for one in recipes()])
        return 0
    for one in recipes():
        typer.echo(f"{one.name:20}{one.facts['title']}\n{'':20}{one.hardware}")
    return 0


@recipe.command(cls=SectionedCommand)
def show(name: Name, *, as_json: AsJson = False) -> int:
    """Show a recipe: hardware, expected scores with their source, options and command."""
    found = read_recipe(name)
    if as_json:
        print_json(found.document())
        return 0
    more = {"hardware": found.hardware, "command": f"aitrain recipe run {name}", "options": str(found.config)}
    for key, text in {**found.facts, **more}.items():
        if text:
            lines = textwrap.wrap(text, 70, break_long_words=False, break_on_hyphens=False)
            typer.echo(f"{key:10}" + f"\n{'':10}".join(lines))
    typer.echo()
    typer.echo(found.config.read_text(encoding="utf-8").partition("\n")[2].rstrip())
    return 0


@recipe.command(cls=SectionedCommand)
@with_options(TrainConfig)
def run(
    name: Name,
    tiny: Annotated[bool, typer.Option("--tiny", help="With the tiny model, in seconds on the CPU.")] = False,
    *,
    dry_run: DryRun = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    as_json: AsEvents = False,
    **flags: Flag,
) -> int:
    """Train a recipe. The flags are those of aitrain grpo, and override its options."""
    options = resolve(TrainConfig, None, given_flags(flags), read_recipe(name).options(tiny))
    return train(options, Verbosity(quiet, verbose, debug, as_json), dry_run)


DEMO: dict[str, object] = {
    "model": "tiny",
    "rl_env": "envs.arithmetic",
    "rl_preset": "recommended",
    "rl_prompts_per_step": 16,
    "batch_size": 128,
    "rl_max_new_tokens": 8,
    "lr": 4e-4,
    "max_steps": 80,
    "eval_cases": 200,
    "eval_strategy": "no",
    "disable_gradient_checkpointing": True,
    "project_name": "demo",
}


@with_options(TrainConfig, {"seed", "project_name", "output_dir"})
def demo(
    *,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    as_json: AsEvents = False,
    **flags: Flag,
) -> int:
    """Teach the tiny model to add, in about a minute on two CPU cores."""
    return train(resolve(TrainConfig, None, given_flags(flags), DEMO), Verbosity(quiet, verbose, debug, as_json))
