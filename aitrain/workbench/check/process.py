"""The process of `aitrain env check`, which runs the user's code: it is started, what became of it is said, and what it
finds is shown, one line for each check.

It sends what it finds through its standard output, one JSON line each. What the environment prints goes to a file.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from aitrain.errors import Interrupted
from aitrain.events import Note
from aitrain.execution.process_tree import ProcessTree
from aitrain.execution.user_code import stack_of_dump, users_line
from aitrain.options.train import TrainConfig
from aitrain.redaction import redact
from aitrain.ui.output import escape_controls
from aitrain.workbench.check.subject import LEVELS

MODULE = "aitrain.jobs.env_check"
Message = dict[str, Any]
LINES = 3
"""Last lines of output that are shown of a process that ended."""

COLOURS = {"ok": "green", "fail": "red", "warning": "yellow"}


def messages_of(request: Message, variables: Mapping[str, str] = {}) -> Iterator[Message]:
    """What the process of MODULE sends, which has these environment variables as well. If it ends in a check,
    this is the error, and those after it are not made."""
    with tempfile.TemporaryDirectory(prefix="aitrain-check-") as folder:
        file, log = Path(folder, "request.json"), Path(folder, "output.log")
        file.write_text(json.dumps(request), encoding="utf-8")
        environment = {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false", **os.environ, **variables}
        command = [sys.executable, "-P", "-m", "aitrain.ui.output", MODULE, str(file)]
        with log.open("wb") as output:
            tree = ProcessTree(command, env=environment, stdout=subprocess.PIPE, stderr=output)
        when = "it is constructed"
        try:
            for line in tree.stdout:
                message = json.loads(line)
                if "running" in message:
                    when = f"the check {message['running']} runs"
                yield message
                if "episodes" in message or "error" in message:
                    return
            said, code = log.read_text(encoding="utf-8", errors="replace"), tree.wait()
            last = said.splitlines()[-LINES:]
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            if "Timeout (" in said:  # of faulthandler, whose stacks are the last lines
                last = []
                how = f"hangs {users_line(stack_of_dump(said.rpartition('Timeout (')[2], ('', '')))}".strip()
            text = [
                f"The environment's process {how} while {when}, as that of a training would",
                *last,
                "Bound what it does for long and odd replies, or use --rl-env-isolation process: then all checks run.",
            ]
            yield {"error": "\n".join(text), "exit_code": 3}
        except KeyboardInterrupt:
            yield {"error": "Stopped.", "exit_code": Interrupted.exit_code}
        finally:
            tree.close()
            tree.stdout.close()


# -- before a training

FAST_SECONDS = 10.0
FAST_CHECKS = ("dataset", "reference", "duplicates", "leaked-answer", "floor", "other-answer", "exceptions")


def check_quickly(config: TrainConfig, seconds: float = FAST_SECONDS) -> tuple[list[Note], str]:
    """Run FAST_CHECKS for a few seconds; returns the findings, without those that are only worth knowing, or what
    is well, and if every episode failed, the first failure. Nothing that goes wrong here ends the run."""
    options = config.model_dump(mode="json", exclude_unset=True)
    request = {"options": options, "only": FAST_CHECKS, "seconds": seconds}
    messages = messages_of(request, {"HF_HUB_OFFLINE": "1"})  # what the run has downloaded is in the cache
    document = report(messages, lambda _: None)
    checks, reason = document["checks"], document.get("error", "").partition("\n")[0]
    notes = [
        Note(" ".join(f"Environment check {check['name']}: {one['what']} {one['fix']}".split()))
        for check in checks
        for one in check["findings"]
        if one["level"] != "info"
    ]
    if reason or not notes:
        passed = sum(not (check["skipped"] or check["findings"]) for check in checks)
        text = f"Environment checks: {passed} passed{', the others not made: ' * bool(reason)}{reason}."
        notes.append(Note(text, "warning" if reason else "info"))
    return notes, document.get("all_failed") or ""


# -- the report


def report(messages: Iterable[Message], show: Callable[[str], object], is_verbose: bool = False) -> Message:
    """Show the report line by line, as the messages arrive, advice on what is no defect only if it is verbose; returns
    it as a JSON object. Its exit code is 0 if nothing failed, else 3, or that of the error that ended it."""
    document: Message = {"checks": [], "exit_code": 0}
    for message in messages:
        if opened := message.get("opened"):
            show(_plain("{name}: {cases} cases, {held_out} held out\n{note}".format(**opened)))
        if result := message.get("result"):
            document["checks"].append(result)
            for line in _result_lines(result, is_verbose):
                show(line)
        elif "running" not in message:
            document |= message
    counts = Counter(finding["level"] for one in document["checks"] for finding in one["findings"])
    if counts["fail"] and "error" not in document:
        document["exit_code"] = 3
    if document["checks"]:
        named = ", ".join(f"{counts[level]} {level}" for level in LEVELS if counts[level])
        made = sum(not one["skipped"] for one in document["checks"])
        played = f" with {document['episodes']} episodes" if "episodes" in document else ""
        show(f"\n{made} checks{played}: {named or 'nothing found'}")
    return document


def _result_lines(result: Message, is_verbose: bool) -> Iterator[str]:
    findings = sorted(result["findings"], key=lambda finding: LEVELS.index(finding["level"]))
    level, text = findings[0]["level"] if findings else "ok", result["description"]
    if result["skipped"]:
        level, text = "-", _plain(f"not checked: {result['skipped']}")
    yield typer.style(f"{level:8}", COLOURS.get(level)) + f" {result['name']:18} {text}"
    width = max(36, min(106, shutil.get_terminal_size().columns))
    for one in [one for one in findings if is_verbose or one["level"] != "info" or not one["why"]]:
        case = "" if one["case_idx"] is None else f" (case {one['case_idx']})"
        for label, text in (("", f"{one['what']}{case}"), ("why", one["why"]), ("fix", one["fix"])):
            for paragraph in _plain(text).splitlines():
                yield textwrap.fill(
                    paragraph, width, initial_indent=f"  {label:4}", subsequent_indent=" " * 6, break_on_hyphens=False
                )
                label = ""


def _plain(text: str) -> str:
    """Text of the environment, safe for a terminal."""
    return escape_controls(redact(text))
