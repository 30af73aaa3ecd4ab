"""The parent's side of `aitrain env check`: starts the process that runs the user's code, and watches it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from aitrain.runs.watchdog import DUMP
from aitrain.workbench.check.report import Message

PATIENCE = 300.0
"""Seconds without a message after which the process is ended, beside the deadline of calls."""
STACK_SECONDS = 2.0


def messages_of(module: str, request: Mapping[str, object], patience: float = PATIENCE) -> Iterator[Message]:
    """What the process `python -m MODULE` sends, see workbench/worker.py; and if it dies or hangs, an error."""
    with tempfile.TemporaryDirectory(prefix="aitrain-check-") as folder:
        file, log = Path(folder, "request.json"), Path(folder, "output.log")
        file.write_text(json.dumps(request), encoding="utf-8")
        environment = {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(file)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield from _watched(child, log, patience)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _watched(child: subprocess.Popen[bytes], log: Path, patience: float) -> Iterator[Message]:
    running, is_done = "the environment is constructed", False
    assert child.stdout is not None
    for line in _lines(child.stdout, patience):
        if line is None:
            with suppress(ProcessLookupError):
                child.send_signal(DUMP)
            time.sleep(STACK_SECONDS)
            yield _error(f"The environment's process hangs while {running}: no sign of life for {patience:.0f}s.", log)
            return
        message: Message = json.loads(line)
        is_done = "episodes" in message or "error" in message
        if "running" in message:
            running = f"the check {message['running']} runs"
        yield message
    code = child.wait()
    if not is_done:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        yield _error(f"The environment's process {how} while {running}.", log)


def _lines(pipe: IO[bytes], patience: float) -> Iterator[bytes | None]:
    """Lines of a pipe; None if none comes for `patience` seconds."""
    waiting = b""
    while True:
        if not select.select([pipe], [], [], patience)[0]:
            yield None
            return
        read = os.read(pipe.fileno(), 1 << 16)
        if not read:
            return
        *whole, waiting = (waiting + read).split(b"\n")
        yield from whole


def _error(what: str, log: Path) -> Message:
    said = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:])
    advice = "Code that crashes or hangs can be trained with --rl-env-isolation process."
    return {"error": "\n".join(filter(None, (what, said, advice))), "exit_code": 3}
