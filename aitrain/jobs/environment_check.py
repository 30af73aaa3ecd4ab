"""The fast checks of the environments before a training, on its first process."""

from __future__ import annotations

from collections.abc import Mapping

from accelerate import PartialState

from aitrain.environment.dataset import Datasets
from aitrain.environment.loader import errors_of
from aitrain.errors import EnvironmentFailed
from aitrain.training.run_context import RunContext
from aitrain.workbench.check.before_training import FastCheck, check_quickly


def note_findings(context: RunContext, built: Mapping[str, Datasets]) -> dict[str, FastCheck]:
    """Check each environment on the first rank, if the options ask for it, and note what was found. A finding does not
    end the run: the model may answer better than the scripted answers of the checks."""
    if not context.config.rl_check or not PartialState().is_main_process:
        return {}
    context.enter("checking the environment", moves_files=False)
    checks = {}
    for name, runner in context.runner.parts.items():
        found = checks[name] = check_quickly(runner.environment, built[name][0], runner.config)
        for line in found.lines():
            context.note(f"{name}: {line}" if name else line, "info" if found.is_clean else "warning")
    return checks


def refuse_unscorable(context: RunContext, built: Mapping[str, Datasets]) -> None:
    """The same for a dry run, which also refuses an environment that fails in all episodes.

    Raises:
        EnvironmentFailed: every episode failed, so the run would end when it scores its held-out cases.
    """
    for name, found in note_findings(context, built).items():
        if found.all_failed:
            with errors_of(name):
                raise EnvironmentFailed(
                    f"Each of the {found.played} episodes that were tried failed: {found.all_failed}\n"
                    "A run whose held-out cases all fail ends before its first step. Try one: aitrain env play"
                )
