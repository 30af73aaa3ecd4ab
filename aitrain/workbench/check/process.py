"""The parent's side of `aitrain env check`: starts the process that runs the user's code, and watches it."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from aitrain.errors import Interrupted
from aitrain.execution.process_tree import ProcessTree
from aitrain.execution.user_code import stack_of_dump, users_line
from aitrain.runs.watchdog import DUMP
from aitrain.workbench.check.finding import NO_TIME, EnvFinding
from aitrain.workbench.check.report import Message

PATIENCE = 300.0
"""Seconds that the environment may take to be constructed, beside the deadline of calls."""
SECONDS = 180.0
"""What all checks together may take; what is not checked by then is left out."""
STACK_SECONDS = 1.0


def messages_of(module: str, request: Mapping[str, object], patience: float = PATIENCE) -> Iterator[Message]:
    """What the process `python -m MODULE` sends, see workbench/worker.py. If it dies or hangs in a check, this is a
    finding, and the check and those after it run in a new one, with the environment's calls in processes."""
    try:
        yield from _Checks({**request, "seconds": SECONDS}).messages(module, patience)
    except KeyboardInterrupt:
        yield {"error": "Stopped.", "exit_code": Interrupted.exit_code}


class _Checks:
    """What one command checks, in one process after another."""

    def __init__(self, request: Message) -> None:
        self.request = request
        self.left: dict[str, str] | None = None
        """The checks without a result, in their order, with their descriptions; None until there is an environment."""
        self.findings: list[Message] = []
        """About the first of these, in which a process was lost."""
        self.end = math.inf

    def messages(self, module: str, patience: float) -> Iterator[Message]:
        """What the processes send, as if it were one."""
        while self.left is None or self.left:
            lost: Message = {}
            for message in _of_process(module, self.request, patience):
                if "lost" in message:
                    lost = message
                else:
                    yield from self._take(message)
            if self.left is None:
                yield from [{"error": f"{lost['lost']}\n{lost['said']}", "exit_code": 3}] if lost else []
            if self.left is None or not lost:
                return
            yield from self._go_on(lost)
            patience = max(0.0, self.end - time.monotonic())

    def _take(self, message: Message) -> Iterator[Message]:
        if "planned" in message:
            if self.left is None:
                self.left, self.end = message["planned"], time.monotonic() + SECONDS
        elif "result" in message:
            assert self.left is not None
            del self.left[message["result"]["name"]]
            message["result"]["findings"][:0] = self.findings
            self.findings = []
            yield message
        elif "opened" not in message or self.left is None:
            yield message

    def _go_on(self, lost: Message) -> Iterator[Message]:
        """Decide what the next process checks; yields the results of checks that are given up."""
        assert self.left is not None
        options, seconds = self.request["options"], self.end - time.monotonic()
        given_up = dict.fromkeys(self.left, NO_TIME) if seconds < 0 else {}
        if self.left:
            name, is_isolated = next(iter(self.left)), options.get("rl_env_isolation") == "process"
            if lost["is_late"]:
                given_up[name] = lost["lost"]
            else:
                self.findings.append(_finding(name, lost["lost"], is_isolated))
                if is_isolated or seconds < 0:
                    given_up[name] = ""
        for name, skipped in given_up.items():
            found = {"name": name, "description": self.left[name], "findings": [], "skipped": skipped, "seconds": 0.0}
            yield from self._take({"result": found})
        options = options if lost["is_late"] else {**options, "rl_env_isolation": "process"}
        self.request = {**self.request, "options": options, "only": list(self.left), "seconds": seconds}


def _finding(check: str, lost: str, is_isolated: bool) -> Message:
    why = "Nothing ends such a call in a thread: a training hangs or ends with it."
    fix = "Bound what it does for a long or odd reply, or train with --rl-env-isolation process."
    if not is_isolated:
        lost += "\nThis check and those after it ran with --rl-env-isolation process."
    return EnvFinding(check, "fail", lost, "" if is_isolated else why, fix).to_json()


def _of_process(module: str, request: Message, patience: float) -> Iterator[Message]:
    """What one process sends; at last `lost` with the reason, if it dies or hangs."""
    with tempfile.TemporaryDirectory(prefix="aitrain-check-") as folder:
        file, log = Path(folder, "request.json"), Path(folder, "output.log")
        file.write_text(json.dumps(request), encoding="utf-8")
        environment = {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false", **os.environ}
        command = [sys.executable, "-P", "-m", module, str(file)]
        with log.open("wb") as output:
            tree = ProcessTree(command, env=environment, stdout=subprocess.PIPE, stderr=output)
        try:
            yield from _watched(tree, log, patience)
        finally:
            tree.close()
            tree.stdout.close()


def _watched(tree: ProcessTree, log: Path, patience: float) -> Iterator[Message]:
    check, waiting, silence, limit = "", b"", patience, patience
    end = time.monotonic() + limit
    while select.select([tree.stdout], [], [], max(0.0, min(silence, end - time.monotonic())))[0]:
        read = os.read(tree.stdout.fileno(), 1 << 16)
        if not read:
            code = tree.wait()
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            yield _lost(f"The environment's process {how} while {_doing(check)}.", log)
            return
        *whole, waiting = (waiting + read).split(b"\n")
        for message in filter(None, map(json.loads, whole)):
            if "running" in message:
                check, silence, limit = message["running"], message["silence"], message["limit"]
                end = time.monotonic() + limit
            else:
                yield message
            if "episodes" in message or "error" in message:
                return
    is_late = bool(check) and time.monotonic() >= end
    before = log.stat().st_size
    tree.send(DUMP)
    time.sleep(STACK_SECONDS)
    where = users_line(stack_of_dump(log.read_text(encoding="utf-8", errors="replace")[before:], ("", "")))
    if is_late:
        yield {"lost": f"took longer than {limit:.0f} seconds {where}".strip(), "is_late": True}
    else:
        what = f"The environment's process hangs while {_doing(check)}: no sign of life for {silence:.0f} seconds."
        yield _lost(f"{what}\n{where}".strip(), log)


def _doing(check: str) -> str:
    return f"the check {check} runs" if check else "the environment is constructed"


def _lost(why: str, log: Path) -> Message:
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
    advice = "Code that crashes or hangs can be trained with --rl-env-isolation process."
    return {"lost": why, "is_late": False, "said": "\n".join([*said, advice])}
