"""`aitrain recipe`: settings for known tasks, each with its environment, hardware and expected scores."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Annotated

import typer

from aitrain.cli.flags import Flag, given_flags, with_options
from aitrain.cli.verbosity import Verbosity
from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.ui.loading import loading

recipe = typer.Typer(
    help="Settings for known tasks, each with its environment, hardware and expected scores.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@recipe.callback()
def _group() -> None:
    """Settings for known tasks, each with its environment, hardware and expected scores."""


@recipe.command("list")
def recipe_list(
    *, as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of lines.")] = False
) -> int:
    """List the recipes."""
    from aitrain.options.recipes import recipes  # here, because help needs none of it

    found = recipes()
    if as_json:
        typer.echo(json.dumps([one.facts() for one in found], indent=2))
        return 0
    for one in found:
        typer.echo(f"{one.name:14} {one.title}\n{'':14} {one.about}")
    return 0


@recipe.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the recipe.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of lines.")] = False,
) -> int:
    """Show a recipe: hardware, minutes, expected scores with their source, options and command."""
    from aitrain.options.recipes import read_recipe

    found = read_recipe(name)
    if as_json:
        typer.echo(json.dumps(found.facts(), indent=2))
        return 0
    facts = found.facts()
    for key in ("title", "about", "hardware", "minutes", "before", "after", "source"):
        typer.echo(f"{key:9} {facts[key]}")
    typer.echo(f"{'measured':9} {'by us' if found.is_measured else 'not by us'}")
    typer.echo(f"{'command':9} {found.command}")
    typer.echo(f"{'options':9} {found.config}\n")
    typer.echo(found.config.read_text(encoding="utf-8").partition("\n")[2].rstrip())
    return 0


@recipe.command()
@with_options(TrainConfig)
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the recipe.")],
    tiny: Annotated[bool, typer.Option("--tiny", help="With the tiny model, in seconds on the CPU.")] = False,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, and train nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show errors and the last line only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the libraries print as well.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' output.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write events as JSON lines.")] = False,
    **flags: Flag,
) -> int:
    """Train a recipe. The flags are those of aitrain grpo, and override its options."""
    with loading("checking the options", quiet):
        from aitrain.launch.preflight import check
        from aitrain.options.reading import resolve
        from aitrain.options.recipes import read_recipe

        found = read_recipe(name)
        options = resolve(TrainConfig, None, given_flags(flags), found.options(tiny))
    if dry_run and as_json:
        raise ConfigError("--json: a dry run of a recipe is text; leave it out")
    if dry_run:
        from aitrain.cli.grpo import checked_lines, plan_lines

        plan = check(options)
        for line in (*plan_lines(plan), *checked_lines(plan, False, debug)):
            typer.echo(line)
        return 0
    with loading("starting", quiet):
        from aitrain.cli.running import start

    with ExitStack() as locks:
        return start(check(options, locks=locks), Verbosity(quiet, verbose, debug, as_json))
