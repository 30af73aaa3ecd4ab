"""Starts the process in which the user's environment runs, on the terminal of the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from aitrain.launch.processes import on_stop_signals


def run_on_terminal(module: str, request: Mapping[str, object]) -> int:
    """Run `python -m MODULE FILE` with the terminal of this process; FILE holds the request as JSON.

    The file, and not an argument, as other users of the machine can read the arguments of a process. Returns the exit
    code; 128 + N if signal N killed the process.
    """
    with tempfile.NamedTemporaryFile("w", prefix="aitrain-env-", suffix=".json", encoding="utf-8") as file:
        json.dump(request, file)
        file.flush()
        # -P keeps the working directory off the path: a file json.py there must not hide the library
        command = [sys.executable, "-P", "-m", "aitrain.jobs.terminal_job", module, file.name]
        # the hash seed as in training, so that the order of sets is the same
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_VERBOSITY": "error"}  # else each try of the Hub is shown
        child = subprocess.Popen(command, env={"PYTHONHASHSEED": "0", **quiet, **os.environ})
        with on_stop_signals(lambda number, _: child.terminate() if number == signal.SIGTERM else None):
            code = child.wait()  # it gets Ctrl-C from the terminal as well
    return code if code >= 0 else 128 - code


def limit_threads(model: str) -> None:
    """Give the processes of this command one thread for a small model, as in training; the user's own value wins."""
    from aitrain.launch.model_shape import is_small

    if is_small(model):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
