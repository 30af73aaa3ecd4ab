"""Starts the process of `aitrain env check`, which runs the user's code, and says what became of it.

What it finds comes through its standard output, one JSON line each. What the environment prints goes to a file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aitrain.errors import Interrupted
from aitrain.execution.process_tree import ProcessTree
from aitrain.execution.user_code import stack_of_dump, users_line
from aitrain.workbench.check.subject import CheckResult, EnvFinding

MODULE = "aitrain.workbench.check"
Message = dict[str, Any]
LINES = 3
"""Lines of output that are shown of a process that ended before its first check."""


def messages_of(request: Message, module: str = MODULE, hash_seed: str | None = None) -> Iterator[Message]:
    """What the process `python -m MODULE` sends. If it ends in a check, this is what the check found, and those after
    it are skipped."""
    with tempfile.TemporaryDirectory(prefix="aitrain-check-") as folder:
        file, log = Path(folder, "request.json"), Path(folder, "output.log")
        file.write_text(json.dumps(request), encoding="utf-8")
        variables = {"PYTHONHASHSEED": hash_seed} if hash_seed else {}
        environment = {"PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false", **os.environ, **variables}
        command = [sys.executable, "-P", "-m", module, str(file)]
        with log.open("wb") as output:
            tree = ProcessTree(command, env=environment, stdout=subprocess.PIPE, stderr=output)
        name, left = "", list[str]()
        try:
            for line in tree.stdout:
                message = json.loads(line)
                name, left = message.get("running", name), message.get("left", left)
                yield message
                if "episodes" in message or "error" in message:
                    return
            said, code = log.read_text(encoding="utf-8", errors="replace"), tree.wait()
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
            if "Timeout (" in said:  # of faulthandler
                how = f"hangs {users_line(stack_of_dump(said.rpartition('Timeout (')[2], ('', '')))}".strip()
            if not name:
                advice = "Code that crashes or hangs can be trained with --rl-env-isolation process."
                text = [
                    f"The environment's process {how} while it is constructed.",
                    *said.splitlines()[-LINES:],
                    advice,
                ]
                yield {"error": "\n".join(text), "exit_code": 3}
                return
            finding = EnvFinding(
                "fail",
                f"The environment's process {how} while the check {name} runs.",
                "Nothing ends such a call in a thread: a training hangs or ends with it.",
                "Bound what it does for a long or odd reply. With --rl-env-isolation process all checks run, as"
                " training does then.",
                check=name,
            )
            yield {"result": asdict(CheckResult(name, findings=[finding]))}
            for other in left:
                yield {"result": asdict(CheckResult(other, skipped=f"the process ended in the check {name}"))}
        except KeyboardInterrupt:
            yield {"error": "Stopped.", "exit_code": Interrupted.exit_code}
        finally:
            tree.close()
            tree.stdout.close()
