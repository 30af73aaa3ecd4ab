"""`aitrain sweep`: search the options of a run, one trial after another."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from aitrain.cli.verbosity import Verbosity
from aitrain.errors import ConfigError
from aitrain.events import Announce, Evaluated, Event, Note
from aitrain.packages import installed
from aitrain.runs.new_folder import locked
from aitrain.runs.run_folder import SWEEP_LOG, RunFolder, make_unused, to_json_object
from aitrain.ui.dashboard import Dashboard, event_line
from aitrain.ui.log_tail import LogTail
from aitrain.ui.terminal import Screen, on_standard_error

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

    from aitrain.launch.sweep import SweepPlan


def sweep(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="YAML file with fixed options and a search space; or a sweep's folder."),
    ],
    trials: Annotated[str | None, typer.Option(help="Number of trials; overrides the file.")] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Trials at the same time; they divide the GPUs.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the sweep in this folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, and train nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    *,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show errors and the result only.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what the libraries print as well.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> int:
    """Search the options of a run: each trial is a run, and the held-out score after it says which is best."""
    for package in ("optuna", "plotly"):
        if installed(package) is None:
            raise ConfigError(
                f'aitrain sweep: {package} is not installed\nInstall it with: pip install "aitrain[sweep]"'
            )
    from aitrain.launch.sweep import check_sweep  # here, because help needs none of it
    from aitrain.options.reading import resolve
    from aitrain.options.sweep import SweepConfig
    from aitrain.options.yaml_text import write_yaml
    from aitrain.ui.sweep_page import open_study

    flags: dict[str, object] = {} if trials is None else {"trials": trials}
    if resume:
        plan = check_sweep(SweepConfig.read({**open_study(file).user_attrs.get("config", {}), **flags}))
    else:
        plan = check_sweep(resolve(SweepConfig, file, flags))
    if dry_run:
        derived = {"trials": plan.trials, "folder": str(plan.folder), "notes": [*plan.notes]}
        document = {**plan.config.written(), **derived}
        typer.echo(json.dumps(document, indent=2) if as_json else write_yaml(document).rstrip())
        return 0
    return _play(plan, file if resume else None, parallel, Verbosity(quiet, verbose, debug), as_json)


def _play(plan: SweepPlan, folder: Path | None, parallel: int, verbosity: Verbosity, as_json: bool) -> int:
    """Play the trials that are left in a folder, by default a new one, and show the result; returns the exit code."""
    from aitrain.launch.nvidia import visible_gpus
    from aitrain.launch.processes import on_stop_signals
    from aitrain.launch.sweep import Sweep, device_shares, pruner_of
    from aitrain.ui.sweep_page import best_trial, open_study, write_page

    shares = device_shares(visible_gpus(), parallel)
    is_new = folder is None
    if folder is None:
        plan.folder.parent.mkdir(parents=True, exist_ok=True)
        folder = make_unused(plan.folder)
    console = Console(quiet=True) if verbosity.quiet else on_standard_error()
    with locked(RunFolder(folder)), Screen(console) as screen:
        (folder / f"{SWEEP_LOG}.lock").unlink(missing_ok=True)  # Optuna's own, which a killed sweep may have left
        study = open_study(folder, is_new, plan.config.direction)
        study.set_user_attr("config", to_json_object(plan.config.written()))
        study.pruner = pruner_of(plan.config)
        shown = SweepScreen(screen.start(), study, folder, plan.trials, parallel, verbosity.verbose)
        for note in plan.notes:
            shown.show(Note(note))
        played = Sweep(plan, folder, study, shown.begin, shown.end)
        try:
            with on_stop_signals(lambda *_: played.stop()):
                played.run(shares)
        finally:
            screen.dashboard.is_over = True  # what follows says how it ended
            write_page(study, folder)
    _show_result(study, folder, as_json)
    if played.stops:
        print(f"stopped; continue with:\n  aitrain sweep {shlex.quote(str(folder))} --resume", file=sys.stderr)
        return 130
    return 0 if best_trial(study) else 1


def _show_result(study: Study, folder: Path, as_json: bool) -> None:
    from aitrain.ui import sweep_page

    if as_json:
        best = sweep_page.best_trial(study)
        trials = [
            {
                "number": trial.number,
                "status": sweep_page.STATUS[trial.state],
                "values": trial.params,
                "score": trial.value if trial.state.name == "COMPLETE" else None,
                "scores": trial.intermediate_values,
                **trial.user_attrs,
            }
            for trial in study.get_trials()
        ]
        commands = sweep_page.next_commands(study, folder)
        document = {"folder": str(folder), "trials": trials, "best": best and best.number, "commands": commands}
        typer.echo(json.dumps(document, indent=2))
        return
    rows = sweep_page.table(sweep_page.ranked(study))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    typer.echo(f"\n{sweep_page.summary_line(study)}")
    for line in sweep_page.best_lines(study, folder):
        typer.echo(line)
    typer.echo(f"\nfolder: {folder}\npage:   {folder / sweep_page.PAGE}")


@dataclass
class SweepScreen:
    """Shows the trials of a sweep: lines when one begins or ends, and with one at a time the live block of its run."""

    screen: Screen
    study: Study
    folder: Path
    planned: int
    parallel: int
    is_verbose: bool
    notes: set[str] = field(default_factory=set)
    """Texts of the notes that were shown."""

    def begin(self, trial: FrozenTrial) -> Announce:
        """Show that a trial begins; returns where its events go."""
        from aitrain.ui.sweep_page import trial_name, values_text

        self._say(trial, values_text(trial.params))
        if self.parallel == 1:
            self.screen.dashboard = Dashboard()
            if self.is_verbose:
                self.screen.new_lines = LogTail(RunFolder(self.folder / trial_name(trial)).log)
        return partial(self._show, trial) if self.parallel > 1 else self.show

    def end(self, trial: FrozenTrial) -> None:
        """Show how a trial ended, and which is the best so far."""
        from aitrain.ui.sweep_page import best_trial, outcome, trial_name, write_page

        best = best_trial(self.study)
        ahead = f"; best so far {best.value:.3f} ({trial_name(best)})" if best and best.number != trial.number else ""
        self._say(trial, f"{outcome(trial)}{ahead}")
        write_page(self.study, self.folder)

    def show(self, event: Event) -> None:
        """Show an event, but each note only once: all trials have the same ones on the environment."""
        if isinstance(event, Note):
            if event.text in self.notes:
                return
            self.notes.add(event.text)
        self.screen(event)

    def _show(self, trial: FrozenTrial, event: Event) -> None:
        """Show the notes and the scores of one of several trials at a time."""
        if isinstance(event, Note):
            self.show(event)
        elif isinstance(event, Evaluated) and event.sampled is not None:
            self._say(trial, event_line(event))

    def _say(self, trial: FrozenTrial, text: str) -> None:
        self.screen(Note(f"trial-{trial.number} ({trial.number + 1} of {self.planned}): {text}", "info"))
