"""Starts the process in which the user's environment runs, on the terminal of the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType


def run_on_terminal(module: str, request: Mapping[str, object]) -> int:
    """Run `python -m MODULE FILE` with the terminal of this process; FILE holds the request as JSON.

    The file, and not an argument, as other users of the machine can read the arguments of a process. Returns the exit
    code; 128 + N if signal N killed the process.
    """
    with tempfile.NamedTemporaryFile("w", prefix="aitrain-env-", suffix=".json", encoding="utf-8") as file:
        json.dump(request, file)
        file.flush()
        # -P keeps the working directory off the path: a file json.py there must not hide the library
        command = [sys.executable, "-P", "-m", module, file.name]
        # the hash seed as in training, so that the order of sets is the same
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_VERBOSITY": "error"}  # else each try of the Hub is shown
        child = subprocess.Popen(command, env={"PYTHONHASHSEED": "0", **quiet, **os.environ})
        with _left_to(child):
            code = child.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _left_to(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave Ctrl-C to the child, which gets it from the terminal as well, and forward SIGTERM to it."""

    def forward(_: int, __: FrameType | None) -> None:
        child.terminate()

    before = {signal.SIGINT: signal.getsignal(signal.SIGINT), signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
    if before[signal.SIGINT] is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda _, __: None)
    signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def limit_threads(model: str) -> None:
    """Give the processes of this command one thread for a small model, as in training; the user's own value wins."""
    from aitrain.launch.model_shape import is_small

    if is_small(model):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def check_environment(options: Mapping[str, object]) -> None:
    """Find the environment of these options and read its file, so that a misspelt name is refused at once.

    Raises:
        AitrainError: an option is wrong, or there is no such environment.
    """
    from aitrain.environment.loader import find_environments
    from aitrain.options.reading import resolve
    from aitrain.options.train import TrainConfig

    config = resolve(TrainConfig, None, options)
    find_environments(config)
