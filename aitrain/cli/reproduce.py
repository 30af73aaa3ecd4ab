"""`aitrain reproduce`: trains again from a run folder, and compares what came of it."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aitrain.cli.flags import AsJson, Debug, Quiet, RunName, Verbose, Verbosity, print_json, run_names
from aitrain.errors import ConfigError, WorseError

if TYPE_CHECKING:
    from aitrain.options.train import TrainConfig
    from aitrain.runs.reproduction import Reproduction
    from aitrain.runs.run_folder import RunFolder


def reproduce(
    run: RunName,
    again: Annotated[
        str | None,
        typer.Argument(
            metavar="AGAIN", autocompletion=run_names, help="A run that repeated it already: nothing is trained."
        ),
    ] = None,
    *,
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
    as_json: AsJson = False,
) -> int:
    """Train a run again from its folder, and compare records, metrics and weights."""
    from aitrain.runs.reproduction import compare_repetition  # here, because help needs none of it

    verbosity = Verbosity(quiet, verbose, debug)
    before = _ended_run(run)
    with redirect_stdout(sys.stderr):  # standard output is for the comparison
        code, after = (0, _ended_run(again)) if again is not None else _train_again(before, verbosity)
    if code:
        return code
    compared = compare_repetition(before, after)
    if as_json:
        print_json(compared.to_json())
    else:
        _print(compared)
    if first := compared.first_difference:
        raise WorseError(f"{after.path} is not the same as {before.path}: first in the {first.name}, {first.about}")
    return 0


def _ended_run(name: str) -> RunFolder:
    """The folder of a training that has ended.

    Raises:
        ConfigError: it is none.
    """
    from aitrain.runs.run_folder import RunFolder, read_object
    from aitrain.ui.run_registry import is_run, places

    (path,) = places([name])
    folder = RunFolder(path)
    if not is_run(path):
        raise ConfigError(f"{path} is not a run folder\nList the runs in it with: aitrain show {path}")
    if read_object(folder.status).get("job") is not None:
        raise ConfigError(f"{path} is an eval\nScore the model again with: aitrain eval --config {folder.config}")
    if not read_object(folder.result).get("steps"):
        raise ConfigError(f"{path} has no result: a run that has not ended, or trained nothing, cannot be compared")
    return folder


def _train_again(before: RunFolder, verbosity: Verbosity) -> tuple[int, RunFolder]:
    """Train with the options and the environment of a run, in a new folder beside it; returns the exit code as well."""
    from aitrain.cli.running import train_here
    from aitrain.launch.preflight import check
    from aitrain.runs.new_folder import new_run_folder

    options, notes = _options(before)
    plan = check(options)
    with new_run_folder(options) as folder:
        plan = replace(plan, folder=folder, notes=(*notes, *plan.notes))
        return train_here(plan, verbosity), folder


def _options(before: RunFolder) -> tuple[TrainConfig, list[str]]:
    """The options of the repetition, and notes on what is known to differ already."""
    from aitrain.options.environment import named_place
    from aitrain.options.reading import resolve
    from aitrain.options.train import TrainConfig
    from aitrain.packages import version_of
    from aitrain.runs.model_reference import ModelReference, run_options
    from aitrain.runs.run_folder import read_object

    options = run_options(ModelReference(str(before.path), "run", "", run=before.path))
    options |= {"project_name": f"{before.path.resolve().name}-again", "output_dir": str(before.path.parent)}
    if options.get("nnodes") is None and options.get("launcher") == "local":
        options["num_processes"] = len(list(before.rollouts.glob("*.jsonl")))
    made = read_object(before.environment)
    packages: dict[str, str] = made.get("packages", {})
    notes = [
        f"{name} was {version}, and is {here or 'not installed'} here."
        for name, version in packages.items()
        if (here := version_of(name)) != version
    ]
    given = options.get("rl_env")
    if isinstance(given, list):
        places = dict(map(named_place, map(str, given)))
        each = {
            name: _place(place, made["environments"][name], before.environment_source / name, notes)
            for name, place in places.items()
        }
        options["rl_env"] = [f"{name}={place}" for name, place in each.items()]
    else:
        place = _place(str(given or ""), made, before.environment_source, notes)
        if place != (given or ""):
            options |= {"rl_env": place, "rl_env_class": None, "rl_env_module": None}
    return resolve(TrainConfig, None, options), notes


def _place(place: str, made: dict[str, Any], kept: Path, notes: list[str]) -> str:
    """The environment as it is named, if its source is still there and the same; else the source that the run kept.

    Raises:
        ConfigError: neither can be used.
    """
    from aitrain.runs.environment_source import source_hash, with_imported

    file, kind = made.get("file"), made.get("class")
    if made.get("package") or not kept.is_dir() or not any(kept.iterdir()):
        return place  # an adapter's or a served environment; its version is compared
    if file is not None and source_hash(with_imported([Path(file)])) == made.get("sha256"):
        return place
    name = f"{kind}.py" if file is None else Path(file).name
    found = next(iter(sorted(kept.rglob(name))), None)
    if found is None or (found.parent / "__init__.py").is_file():
        raise ConfigError(
            f"{file} has changed since the run, and belongs to a package, which cannot be loaded from {kept}\n"
            f"Check out the commit of the run ({made.get('git_commit') or 'unknown'}), and repeat the command."
        )
    if file is not None:
        notes.append(f"{file} has changed since the run or is gone: this is the source that the run kept.")
        if source_hash(with_imported([found])) != made.get("sha256"):
            notes.append(f"{found} is not what ran, bit by bit: secrets in it are masked.")
    return f"{os.path.relpath(found)}:{kind}"


def _print(compared: Reproduction) -> None:
    from rich.console import Console

    from aitrain.ui.escape_controls import escape_controls
    from aitrain.ui.terminal import text_table

    console = Console(highlight=False)
    shown = compared.differing_facts if compared.is_same else list(compared.facts)
    if shown:
        rows = [("", compared.run.name, compared.again.name), *((name, *compared.facts[name]) for name in shown)]
        console.print(text_table([[*map(escape_controls, row)] for row in rows]), "\n", soft_wrap=True)
    for part in compared.parts:
        style = {"different": "red", "not compared": "yellow"}.get(part.same, "green")
        console.print(f"{part.name:8} [{style}]{part.same}[/]: ", end="")
        console.print(escape_controls(part.about), markup=False, soft_wrap=True)
