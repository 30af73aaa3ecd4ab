"""The fast checks of the environments before a training, on its first process."""

from __future__ import annotations

from collections.abc import Mapping

from aitrain import activity
from aitrain.environment.dataset import Datasets
from aitrain.environment.loader import errors_of
from aitrain.errors import EnvironmentFailed
from aitrain.training.run_context import RunContext
from aitrain.workbench.check.before_training import check_quickly


def check_environments(context: RunContext, built: Mapping[str, Datasets]) -> None:
    """Check each environment, if the options ask for it, and note what was found. A finding does not end a run: the
    model may answer better than the scripted answers of the checks.

    Raises:
        EnvironmentFailed: in a dry run, every episode failed, so the run would end when it scores its held-out cases.
    """
    if not context.config.rl_check or activity.own.rank != 0:
        return
    context.enter("checking the environment", moves_files=False)
    for name, runner in context.runner.parts.items():
        found = check_quickly(runner.environment, built[name][0], runner.config)
        for line in found.lines():
            context.note(f"{name}: {line}" if name else line, "info" if found.is_clean else "warning")
        if found.all_failed and context.dry_run_of:
            with errors_of(name):
                raise EnvironmentFailed(
                    f"Each of the {found.played} episodes that were tried failed: {found.all_failed}\n"
                    "A run whose held-out cases all fail ends before its first step. Try one: aitrain env play"
                )
