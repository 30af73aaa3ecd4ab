"""The processes of `aitrain env check`: the parent starts `python -m aitrain.workbench.check.process FILE`, which runs
the user's code, and watches it.

Results come through the original standard output of the process, one JSON line each. What the environment prints goes
to its standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aitrain.environment.dataset import dataset_note
from aitrain.environment.judges import model_judge
from aitrain.errors import Interrupted, to_aitrain_error
from aitrain.execution.process_tree import ProcessTree
from aitrain.execution.user_code import stack_of_dump, users_line
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.runs.watchdog import DUMP
from aitrain.workbench.check.registry import CHECKS, EnvCheck, chosen, run_checks
from aitrain.workbench.check.subject import EnvFinding, Subject
from aitrain.workbench.opening import open_environment

PATIENCE = 300.0
"""Seconds that the environment may take to be constructed, beside the deadline of calls; and a check with a model."""
SECONDS = 180.0
"""What all checks together may take; what is not checked by then is left out."""
CHECK_SECONDS = 45.0
"""What one check may take."""
CALL_SECONDS = 10.0
"""Deadline of a call to the environment, unless --rl-env-timeout is given: a hostile reply may hang it."""
BEAT, MARGIN = 1.0, 5.0
"""Seconds between two signs of life; seconds beside the deadline of a call without one, or for the end of a check."""
STACK_SECONDS = 1.0
Message = dict[str, Any]
Send = Callable[[Message], None]


# -- the parent


def messages_of(module: str, request: Message, patience: float = PATIENCE) -> Iterator[Message]:
    """What the process `python -m MODULE` sends. If it dies or hangs in a check, this is what the check found, and
    those after it are skipped."""
    left: dict[str, str] | None = None  # checks without a result, with their descriptions
    try:
        for message in _of_process(module, request, patience):
            left = message.get("planned", left)
            if "result" in message and left:
                del left[message["result"]["name"]]
            if "lost" not in message:
                yield message
                continue
            if left is None:
                yield {"error": f"{message['lost']}\n{message['said']}", "exit_code": 3}
            skipped = message["lost"] if message["is_late"] else ""
            for name, description in (left or {}).items():
                found = EnvFinding(
                    "fail",
                    message["lost"],
                    "Nothing ends such a call in a thread: a training hangs or ends with it.",
                    "Bound what it does for a long or odd reply. With --rl-env-isolation process all checks run, as"
                    " training does then.",
                    check=name,
                )
                findings = [] if skipped else [found.to_json()]
                result = {"name": name, "description": description, "findings": findings, "seconds": 0.0}
                yield {"result": {**result, "skipped": skipped}}
                skipped = f"the process ended in the check {name}" if findings else skipped
    except KeyboardInterrupt:
        yield {"error": "Stopped.", "exit_code": Interrupted.exit_code}


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
            doing, silence, end, waiting = "the environment is constructed", patience, time.monotonic() + patience, b""
            is_check = False
            while select.select([tree.stdout], [], [], max(0.0, min(silence, end - time.monotonic())))[0]:
                read = os.read(tree.stdout.fileno(), 1 << 16)
                if not read:
                    code = tree.wait()
                    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
                    yield _lost(f"The environment's process {how} while {doing}.", log)
                    return
                *whole, waiting = (waiting + read).split(b"\n")
                for message in filter(None, map(json.loads, whole)):
                    if "running" in message:
                        doing, is_check = f"the check {message['running']} runs", True
                        silence, limit = message["silence"], message["limit"]
                        end = time.monotonic() + limit
                    else:
                        yield message
                    if "episodes" in message or "error" in message:
                        return
            before = log.stat().st_size
            tree.send(DUMP)
            time.sleep(STACK_SECONDS)
            dumped = log.read_text(encoding="utf-8", errors="replace")[before:]
            where = users_line(stack_of_dump(dumped, ("", "")))
            if is_check and time.monotonic() >= end:
                yield {"lost": f"took longer than {limit:.0f} seconds {where}".strip(), "is_late": True}
            else:
                what = f"The environment's process hangs while {doing}: no sign of life for {silence:.0f} seconds."
                yield _lost(f"{what}\n{where}".strip(), log)
        finally:
            tree.close()
            tree.stdout.close()


def _lost(why: str, log: Path) -> Message:
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
    advice = "Code that crashes or hangs can be trained with --rl-env-isolation process."
    return {"lost": why, "is_late": False, "said": "\n".join([*said, advice])}


# -- the process


def check(request: Message, send: Send, tokenizer: object = None, more: Sequence[EnvCheck] = ()) -> None:
    """Construct the environment and run the checks; `more` are those that need a tokenizer or a model.

    Raises:
        AitrainError: the environment cannot be constructed.
    """
    start = time.monotonic()
    opened, config = open_environment(resolve(TrainConfig, None, request["options"]), tokenizer)
    checks = chosen(request["only"], [*CHECKS, *more])
    if "rl_env_timeout" not in request["options"]:
        config = config.model_copy(update={"rl_env_timeout": min(CALL_SECONDS, config.rl_env_timeout)})
    counts = {"cases": len(opened.cases), "held_out": len(opened.held_out)}
    name = type(opened.environment).__name__
    quiet = [f"Not asked without --ask-judges: the judge at {url}." for url in sorted(model_judge.not_asked)]
    note = "\n".join(filter(None, (opened.note, dataset_note(opened.environment), *quiet)))
    send({"opened": {"name": name, **counts, "note": note, "seconds": time.monotonic() - start}})
    send({"planned": {one.name: one.description for one in checks}})
    silence = config.rl_env_timeout + MARGIN
    subject = Subject(opened, config, tokenizer, seconds=SECONDS, check_seconds=CHECK_SECONDS)
    with closing(subject):
        for one in checks:
            subject.begin_check()
            limit = PATIENCE if one in more else max(0.0, subject.seconds_left) + silence
            send({"running": one.name, "silence": silence, "limit": limit})
            for result in run_checks(subject, [one]):
                findings = [finding.to_json() for finding in result.findings]
                send({"result": {**asdict(result), "findings": findings}})
    send({"episodes": len(subject.episodes)})


def main(run: Callable[[Message, Send], None] = check) -> None:
    """Run the checks of the request in the file named in argv[1], and leave."""
    channel, lock = os.fdopen(os.dup(1), "w", encoding="utf-8"), threading.Lock()
    os.dup2(2, 1)
    faulthandler.register(DUMP, file=2, all_threads=True)

    def send(message: Message) -> None:
        with lock:
            channel.write(json.dumps(message) + "\n")
            channel.flush()

    def beat() -> None:
        """Show that other threads run."""
        while True:
            send({})
            time.sleep(BEAT)

    threading.Thread(target=beat, name="beat", daemon=True).start()
    try:
        request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        if not request.get("ask_judges"):
            model_judge.go_offline()
        run(request, send)
    except Exception as error:
        ours = to_aitrain_error(error)
        send({"error": str(ours).replace("Training failed: ", "The check failed: "), "exit_code": ours.exit_code})
    sys.stdout.flush()
    os._exit(0)  # threads of the environment do not keep the process


if __name__ == "__main__":
    main()
