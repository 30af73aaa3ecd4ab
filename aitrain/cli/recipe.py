"""`aitrain recipe`: settings for known tasks, each with its environment, hardware and scores; `aitrain demo`."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from aitrain.cli.flags import (
    AsEvents,
    AsJson,
    Debug,
    DryRun,
    Flag,
    Quiet,
    SectionedCommand,
    Verbose,
    Verbosity,
    given_flags,
    group,
    print_json,
    with_options,
)
from aitrain.cli.grpo import train
from aitrain.options.reading import resolve
from aitrain.options.recipes import read_recipe, recipes
from aitrain.options.train import TrainConfig

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
