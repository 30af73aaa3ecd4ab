"""`aitrain sweep`: search the options of a run, one trial after another."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aitrain.cli.flags import AsJson, DryRun, print_json, with_options
from aitrain.errors import ConfigError
from aitrain.options.sweep import SweepConfig
from aitrain.packages import installed
from aitrain.redaction import to_jsonable
from aitrain.runs.new_folder import locked
from aitrain.runs.run_folder import SWEEP_LOG, RunFolder, make_unused

if TYPE_CHECKING:
    from optuna.study import Study


@with_options(SweepConfig, {"trials"})
def sweep(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="YAML file with fixed options and a search space; or a sweep's folder, to continue it."
        ),
    ],
    *,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    **flags: object,
) -> int:
    """Search the options of a run: each trial is a run, and the held-out score after it says which is best."""
    if installed("optuna") is None or installed("plotly") is None:
        raise ConfigError('aitrain sweep needs Optuna and Plotly\nInstall them with: pip install "aitrain[sweep]"')
    from aitrain.execution.process_tree import on_stop_signals
    from aitrain.launch.sweep import Sweep, check_sweep  # these here, as they need Optuna
    from aitrain.options.reading import resolve
    from aitrain.ui.sweep_page import best_trial, open_study
    from aitrain.ui.terminal import Screen

    is_begun = file.is_dir()
    saved = open_study(file).user_attrs.get("config", {}) if is_begun else {}
    plan = check_sweep(resolve(SweepConfig, None if is_begun else file, flags, saved))
    if dry_run:
        print_json({**plan.config.written(), "trials": plan.trials, "folder": str(plan.folder), "notes": plan.notes})
        return 0
    folder = file
    if not is_begun:
        plan.folder.parent.mkdir(parents=True, exist_ok=True)
        folder = make_unused(plan.folder)
    with locked(RunFolder(folder)), Screen() as screen:
        (folder / f"{SWEEP_LOG}.lock").unlink(missing_ok=True)  # Optuna's own, which a killed sweep may have left
        study = open_study(folder, not is_begun)
        study.set_user_attr("config", to_jsonable(plan.config.written()))
        screen.start()
        played = Sweep(plan, folder, study, screen)
        try:
            with on_stop_signals(lambda *_: played.stop()):
                played.run()
        finally:
            screen.dashboard.is_over = True  # what follows says how it ended
    _show_result(study, folder, as_json)
    if played.stops:
        print(f"stopped; continue with:\n  aitrain sweep {shlex.quote(str(folder))}", file=sys.stderr)
        return 130
    return 0 if best_trial(study) else 1


def _show_result(study: "Study", folder: Path, as_json: bool) -> None:
    from aitrain.ui import sweep_page
    from aitrain.ui.terminal import text_table

    if as_json:
        best = sweep_page.best_trial(study)
        trials = [
            {
                "number": trial.number,
                "values": trial.params,
                "score": trial.value,
                **trial.user_attrs,
            }
            for trial in study.get_trials()
        ]
        print_json({"folder": str(folder), "trials": trials, "best": best and best.number})
        return
    typer.echo(text_table(sweep_page.table(sweep_page.ranked(study))).plain)
    typer.echo()
    for line in sweep_page.best_lines(study, folder):
        typer.echo(line)
    typer.echo(f"\nfolder: {folder}\npage:   {folder / sweep_page.PAGE}")
