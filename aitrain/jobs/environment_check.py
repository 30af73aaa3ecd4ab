"""The fast checks of the environment before a training, on its first process."""

from __future__ import annotations

from accelerate import PartialState

from aitrain.environment.dataset import Cases
from aitrain.errors import EnvironmentFailed
from aitrain.training.run_context import RunContext
from aitrain.workbench.check.before_training import FastCheck, check_quickly


def note_findings(context: RunContext, cases: Cases) -> FastCheck | None:
    """Check the environment on the first rank, if the options ask for it, and note what was found. A finding does not
    end the run: the model may answer better than the scripted answers of the checks."""
    if not context.config.rl_check or not PartialState().is_main_process:
        return None
    context.enter("checking the environment", moves_files=False)
    found = check_quickly(context.runner.environment, cases, context.config)
    for line in found.lines():
        context.note(line, "info" if found.is_clean else "warning")
    return found


def refuse_unscorable(context: RunContext, cases: Cases) -> None:
    """The same for a dry run, which also refuses an environment that fails in all episodes.

    Raises:
        EnvironmentFailed: every episode failed, so the run would end when it scores its held-out cases.
    """
    found = note_findings(context, cases)
    if found is not None and found.all_failed:
        raise EnvironmentFailed(
            f"Each of the {found.played} episodes that were tried failed: {found.all_failed}\n"
            "A run whose held-out cases all fail ends before its first step. Try one: aitrain env play"
        )
