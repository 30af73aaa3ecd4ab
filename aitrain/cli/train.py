"""Commands that train: `aitrain grpo`, whose flags are the options of `TrainConfig`; `aitrain recipe`, settings for
known tasks, each with its environment, hardware and scores; `aitrain demo`; and `aitrain reproduce`, which trains again
from a run folder, and compares what came of it."""

import os
import sys
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from aitrain.cli.flags import (
    AsJson,
    ConfigFile,
    DryRun,
    JobCommand,
    RunName,
    group,
    print_json,
    run_argument,
    with_options,
)
from aitrain.errors import AitrainError, ConfigError, WorseError
from aitrain.options.reading import place_of_run, read_recipe, recipes, resolve
from aitrain.options.train import TrainConfig
from aitrain.options.yaml_text import write_yaml
from aitrain.runs.run_folder import RunFolder, read_object


@with_options(TrainConfig)
def grpo(
    config: ConfigFile = None,
    dry_run: DryRun = False,
    *,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume from the newest complete checkpoint: --resume-from-checkpoint auto."),
    ] = False,
    as_json: AsJson = False,
    **flags: object,
) -> int:
    """Train a model with GRPO on your environment.

    aitrain grpo --model tiny --rl-env path/to/file.py:Class

    First steps: aitrain demo, then aitrain env init.
    """
    given = {**({"resume_from_checkpoint": "auto"} if resume else {}), **flags}
    place = place_of_run(config) if config and given.get("resume_from_checkpoint") == "auto" else {}
    return train(resolve(TrainConfig, config, {**place, **given}), as_json, dry_run)


SHOWN = 40
"""Most characters of a fact of a run that `aitrain reproduce` shows."""
REFUSAL_SECONDS = 5.0
"""Seconds for the attempt to tell the other machines that this one cannot run the command."""


def train(options: TrainConfig, as_json: bool, dry_run: bool = False) -> int:
    """Check the options, and train, or for a dry run show the plan; returns the exit code.

    Raises:
        AitrainError: an option is wrong, or the run failed.
    """
    from aitrain.launch.machines import find_nodes, launched_rank  # these here, because help needs none of them
    from aitrain.launch.preflight import check

    if dry_run:
        from aitrain.cli.plan import show_plan

        show_plan(check(options), as_json, is_dry_run=True)
        return 0
    group, rank = None, launched_rank()
    if rank is not None:
        from aitrain.launch.launched_ranks import open_group

        group, options = open_group(options, rank)
    with ExitStack() as locks:
        try:
            plan = check(options, locks=locks)
        except AitrainError as error:
            # the other machines would wait for this one; the refusal itself is said below
            with suppress(AitrainError, OSError):
                if (nodes := find_nodes(options)) is not None:
                    from aitrain.launch.nodes import NodeGroup, open_store

                    (group or NodeGroup(nodes, open_store(nodes, REFUSAL_SECONDS))).refuse(error)
            raise
        from aitrain.cli.running import train_here, train_on

        if plan.nodes is not None:
            return train_on(plan.nodes, plan, as_json, options, group)
        return train_here(plan, as_json, group)


# -- recipes

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the recipe.")]

recipe = group("Settings for known tasks, each with its environment, hardware and expected scores.")


@recipe.command("list")
def recipe_list(*, as_json: AsJson = False) -> int:
    """List the recipes."""
    if as_json:
        print_json([{"name": name, **one} for name, one in recipes().items()])
        return 0
    for name, one in recipes().items():
        how = "measured by us" if one["measured"] else "by the memory estimate; not measured by us"
        typer.echo(f"{name:20}{one['title']}\n{'':20}{one['hardware']}, {how}")
    return 0


@recipe.command()
def show(name: Name) -> int:
    """Show a recipe: hardware, expected scores, options."""
    typer.echo(write_yaml(read_recipe(name)).rstrip())
    return 0


@recipe.command(cls=JobCommand)
@with_options(TrainConfig)
def run(
    name: Name,
    tiny: Annotated[bool, typer.Option("--tiny", help="With the tiny model, in seconds on the CPU.")] = False,
    *,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    **flags: object,
) -> int:
    """Train a recipe. The flags are those of aitrain grpo, and override its options."""
    known = read_recipe(name)
    options = {**known["options"], **(known["tiny"] if tiny else {})}
    return train(resolve(TrainConfig, None, flags, options), as_json, dry_run)


DEMO: dict[str, object] = {
    "model": "tiny",
    "rl_env": "envs.arithmetic",
    "rl_preset": "recommended",
    "rl_max_new_tokens": 8,
    "lr": 4e-4,
    "max_steps": 80,
    "eval_cases": 200,
    "eval_strategy": "no",
    "project_name": "demo",
}


@with_options(TrainConfig, {"seed", "project_name", "output_dir"})
def demo(
    *,
    as_json: AsJson = False,
    **flags: object,
) -> int:
    """Teach the tiny model to add, in about a minute on two CPU cores."""
    return train(resolve(TrainConfig, None, flags, DEMO), as_json)


def reproduce(
    run: RunName,
    again: Annotated[
        str | None,
        run_argument("AGAIN", "A run that repeated it already: nothing is trained."),
    ] = None,
    *,
    as_json: AsJson = False,
) -> int:
    """Train a run again from its folder, and compare records, metrics and weights."""
    from aitrain.environment.completion_parser import short  # these here, because help needs none of them
    from aitrain.runs.reproduction import compare_repetition
    from aitrain.ui.output import escape_controls

    before = _ended_run(run)
    with redirect_stdout(sys.stderr):  # standard output is for the comparison
        code, after = (0, _ended_run(again)) if again is not None else _train_again(before)
    if code:
        return code
    compared = compare_repetition(before, after)
    if as_json:
        print_json(compared.to_json())
    else:
        for part, (same, about) in compared.parts.items():
            typer.echo(escape_controls(f"{part:8} {same}: {about}"))
        for name, (one, other) in compared.facts.items():
            if compared.first_difference or one != other:
                mark, texts = "  " if one == other else "! ", (short(one, SHOWN), short(other, SHOWN))
                typer.echo(escape_controls(f"{mark}{name:20} {texts[0]:{SHOWN}}  {texts[1]}"))
    if first := compared.first_difference:
        raise WorseError(
            f"{after.path} is not the same as {before.path}: first in the {first}, {compared.parts[first][1]}"
        )
    return 0


def _ended_run(name: str) -> RunFolder:
    """The folder of a training that has ended.

    Raises:
        ConfigError: it is none.
    """
    from aitrain.ui.run_registry import run_named

    folder = run_named(name)
    if not read_object(folder.result).get("steps"):
        raise ConfigError(
            f"{folder.path} has no result of a training: a run that has not ended, or an eval, cannot be compared"
        )
    return folder


def _train_again(before: RunFolder) -> tuple[int, RunFolder]:
    """Train with the options and the environment of a run, in a new folder beside it; returns the exit code as well.

    An environment is taken as it is named, if its source is still there and the same; else the source that the run
    kept.

    Raises:
        ConfigError: neither can be used.
    """
    from aitrain.cli.running import train_here
    from aitrain.launch.preflight import check
    from aitrain.runs.environment_source import source_hash, with_imported
    from aitrain.runs.model_reference import found_places, run_options
    from aitrain.runs.new_folder import new_run_folder

    notes, recorded = list[str](), read_object(before.environment)

    def find(name: str, place: str) -> str:
        made = recorded.get("environments", {}).get(name, {}) if name else recorded
        file, kind, kept = made.get("file"), made.get("class"), before.environment_source / name
        if made.get("package") or not any(kept.glob("*")):
            return place  # an adapter's or a served environment; its version is compared
        if file is not None and source_hash(with_imported([Path(file)])) == made.get("sha256"):
            return place
        wanted = f"{kind}.py" if file is None else Path(file).name
        found = min(kept.rglob(wanted), default=None)
        if found is None or (found.parent / "__init__.py").is_file():
            raise ConfigError(
                f"{file} has changed since the run, and belongs to a package, which cannot be loaded from {kept}\n"
                f"Check out the commit of the run ({made.get('git_commit') or 'unknown'}), and repeat the command."
            )
        if file is not None:
            notes.append(
                f"{file} has changed since the run or is gone: this is the source that the run kept, with secrets"
                " masked."
            )
        return f"{os.path.relpath(found)}:{kind}"

    options = run_options(before.path)
    options |= {"project_name": f"{before.path.resolve().name}-again", "output_dir": str(before.path.parent)}
    if options.get("nnodes") is None and options.get("launcher") == "local":
        options["num_processes"] = before.processes
    given = options.get("rl_env") or ""
    places = found_places(given, find)
    if places != given:
        options |= {"rl_env": places, "rl_env_class": None, "rl_env_module": None}
    config = resolve(TrainConfig, None, options)
    plan = check(config)
    with new_run_folder(config) as folder:
        plan = replace(plan, folder=folder, notes=(*notes, *plan.notes))
        return train_here(plan), folder
