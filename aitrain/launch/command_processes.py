"""A dry run, which is one training process that loads no weights; and what a command becomes in which the user's
environment or model runs.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from aitrain.errors import AitrainError, EnvironmentFailed
from aitrain.events import DRY_RUN_VARIABLE, Event, Failed, Note
from aitrain.launch.machines import LaunchedRank
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import Processes
from aitrain.runs.run_folder import RunFolder


def dry_run(plan: RunPlan) -> list[Note]:
    """Check a run in a process of its own, as far as that is possible without its weights; returns its notes.

    Raises:
        AitrainError: the run would be refused, by the same error.
    """
    notes = list[Note]()

    def hear(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event)

    with tempfile.TemporaryDirectory(prefix="aitrain-dry-run-") as parent:
        folder = RunFolder(Path(parent))
        folder.write_config(plan.config)
        variables = {DRY_RUN_VARIABLE: str(plan.batch.processes)}
        end = Processes(replace(plan, launched=None), folder, hear, ranks=[LaunchedRank()], variables=variables).run()
    if not isinstance(end, Failed):
        return notes
    if end.status == "stalled":  # the log with the stacks is gone
        raise EnvironmentFailed(end.message.partition(" train.log")[0])
    error = AitrainError(end.message)
    error.exit_code = end.exit_code
    raise error


# -- on the terminal


def run_on_terminal(module: str, request: Mapping[str, object]) -> NoReturn:
    """Become the program in which `main` of a module does the request; an open file without a name holds it as JSON.

    The file, and not an argument, as other users of the machine can read the arguments of a process.
    """
    with tempfile.TemporaryFile("w", encoding="utf-8") as file:
        json.dump(request, file)
        file.seek(0)
        os.set_inheritable(file.fileno(), True)
        # -P keeps the working directory off the path: a file json.py there must not hide the library
        command = [sys.executable, "-P", "-m", "aitrain.ui.output", module, f"/dev/fd/{file.fileno()}"]
        # the hash seed as in training, so that the order of sets is the same
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_VERBOSITY": "error"}  # else each try of the Hub is shown
        os.execve(command[0], command, {"PYTHONHASHSEED": "0", **quiet, **os.environ})
