"""`aitrain sweep`: search the options of a run, one trial after another."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aitrain.cli.verbosity import Verbosity

if TYPE_CHECKING:
    from aitrain.launch.sweep_plan import SweepPlan
    from aitrain.runs.sweep_record import SweepRecord


def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="YAML file with fixed options and a search space; or a sweep's folder."),
    ],
    trials: Annotated[str | None, typer.Option(help="Number of trials; overrides the file.")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Trials at the same time; they divide the GPUs.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in the folder of this file.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, and train nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    *,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show errors and the result only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the libraries print as well.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> int:
    """Search the options of a run: each trial is a run, and the held-out score after it says which is best."""
    from aitrain.launch.sweep_plan import SWEEP_YAML, read_sweep  # here, because help needs none of it
    from aitrain.options.yaml_text import write_yaml
    from aitrain.runs.run_folder import write_text
    from aitrain.runs.sweep_record import SWEEP_FILE, sweep_lock

    verbosity = Verbosity(quiet, verbose, debug)
    file = file / SWEEP_YAML if file.is_dir() else file
    flags: dict[str, object] = {} if trials is None else {"trials": trials}
    folder = file.parent.resolve() if file.parent.name in ("", "..") else file.parent
    if resume and (folder / SWEEP_FILE).is_file():  # it may have been moved, and its output_dir is relative
        flags |= {"project_name": folder.name, "output_dir": str(folder.parent)}
    plan = read_sweep(file, flags)
    if dry_run:
        typer.echo(json.dumps(_document(plan), indent=2) if as_json else "\n".join(_plan_lines(plan)))
        return 0
    record = plan.resumed() if resume else plan.open_folder()
    with sweep_lock(record.folder):
        if resume:
            record = plan.resumed()  # the lock is held: no other process changes it
            write_text(record.folder / SWEEP_YAML, write_yaml(plan.config.written()))  # a next --resume has them, too
        was_stopped = _play(plan, record, parallel, verbosity)
    _show_result(record, as_json)
    if was_stopped:
        print(f"stopped; continue with:\n  aitrain sweep {shlex.quote(str(record.folder))} --resume", file=sys.stderr)
        return 130
    return 0 if record.best else 1


def _document(plan: SweepPlan) -> dict[str, object]:
    """The plan for programs: the options of the file, and what follows from them."""
    from aitrain.runs.run_folder import to_json_object

    derived = {"folder": str(plan.wanted_folder), "combinations": plan.space.size, "notes": list(plan.notes)}
    return {**to_json_object(plan.config.written()), "trials": plan.trials, **derived}


def _plan_lines(plan: SweepPlan) -> Iterator[str]:
    size = plan.space.size
    of = f" of {size} combinations" if size else ""
    yield f"trials       {plan.trials}{of}, sampler {plan.config.sampler}, pruner {plan.config.pruner}"
    yield f"objective    {plan.config.direction} the held-out score after training ({plan.config.objective})"
    for option in plan.space.options:
        scale = ", by orders of magnitude" if option.log else f", step {option.step}" if option.step else ""
        among = ", ".join(map(str, option.choices)) or f"{option.low} to {option.high}{scale}"
        yield f"  {option.name:18} {among}"
    yield f"folder       {plan.wanted_folder}"
    yield from (f"! {note}" for note in plan.notes)


def _play(plan: SweepPlan, record: SweepRecord, parallel: int, verbosity: Verbosity) -> bool:
    """Play the trials that are left; returns whether a signal stopped the sweep."""
    from aitrain.cli.sweep_screen import SweepScreen
    from aitrain.launch.nvidia import visible_gpus
    from aitrain.launch.stop_signals import on_stop_signals
    from aitrain.launch.sweep import Sweep
    from aitrain.launch.trial_run import TrialRuns, divide_gpus
    from aitrain.ui.sweep_page import write_page

    screen = SweepScreen(record, parallel, verbosity)
    for note in plan.notes:
        screen.say(f"! {note}")
    gpus = divide_gpus(visible_gpus(), parallel) if parallel > 1 else []
    runs = TrialRuns(plan, record.folder, screen.of_trial, gpus)
    sweep = Sweep(plan, record, runs.play, screen.on_change)

    def on_signal(*_: object) -> None:
        """The first one stops the running trials after their step, the second one at once."""
        sweep.is_stopping = True
        runs.stop()

    try:
        with on_stop_signals(on_signal):
            sweep.run(parallel)
    finally:
        screen.close()
        write_page(record)
    return runs.stops > 0


def _show_result(record: SweepRecord, as_json: bool) -> None:
    from aitrain.ui.sweep_page import PAGE
    from aitrain.ui.sweep_table import next_commands, result_lines

    if as_json:
        best = record.best
        values = {name: value for name, value in asdict(record).items() if name != "folder"}
        more = {"folder": str(record.folder), "best": best and best.number, "commands": next_commands(record)}
        typer.echo(json.dumps({**values, **more}, indent=2))
        return
    for line in result_lines(record):
        typer.echo(line)
    typer.echo(f"\nfolder: {record.folder}\npage:   {record.folder / PAGE}")
