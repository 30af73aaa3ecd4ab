"""The process that runs the checks of `aitrain env check`: `python -m aitrain.workbench.worker REQUEST`.

Results go to the parent through the original standard output, one JSON line each. What the environment prints goes to
standard error.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from aitrain.environment.dataset import dataset_note
from aitrain.environment.judges import model_judge
from aitrain.errors import to_aitrain_error
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.runs.watchdog import DUMP
from aitrain.workbench.check.process import PATIENCE
from aitrain.workbench.check.registry import CHECKS, CheckResult, EnvCheck, chosen, run_checks
from aitrain.workbench.check.repetition import unseeded_generators
from aitrain.workbench.check.report import Message
from aitrain.workbench.check.subject import CheckClock, Subject
from aitrain.workbench.opening import open_environment

CALL_SECONDS = 10.0
"""Deadline of a call to the environment, unless --rl-env-timeout is given: a hostile reply may hang it."""
CHECK_SECONDS = 45.0
"""What one check may take."""
BEAT, MARGIN = 1.0, 5.0
"""Seconds between two signs of life; seconds beside the deadline of a call without one, or for the end of a check."""

Send = Callable[[Message], None]


def check(request: Message, send: Send, tokenizer: object = None, more: Sequence[EnvCheck] = ()) -> None:
    """Construct the environment and run the checks; `more` are those that need a tokenizer or a model.

    Raises:
        AitrainError: the environment cannot be constructed.
    """
    start = time.monotonic()
    with unseeded_generators() as unseeded:
        opened, config = open_environment(resolve(TrainConfig, None, request["options"]), tokenizer)
        checks = chosen(request["only"], [*CHECKS, *more])
        if "rl_env_timeout" not in request["options"]:
            config = config.model_copy(update={"rl_env_timeout": min(CALL_SECONDS, config.rl_env_timeout)})
        clock = CheckClock(request["seconds"], CHECK_SECONDS)
        subject = Subject(opened, config, tokenizer, clock=clock, unseeded=unseeded)
        counts = {"cases": len(opened.cases), "held_out": len(opened.held_out)}
        name = type(opened.environment).__name__
        quiet = [f"Not asked without --ask-judges: the judge at {url}." for url in sorted(model_judge.not_asked)]
        note = "\n".join(filter(None, (opened.note, dataset_note(opened.environment), *quiet)))
        send({"opened": {"name": name, **counts, "note": note, "seconds": time.monotonic() - start}})
        send({"planned": {one.name: one.description for one in checks}})
        silence = config.rl_env_timeout + MARGIN
        with closing(subject):
            for one in checks:
                subject.clock.begin_check()
                limit = PATIENCE if one in more else max(0.0, subject.clock.seconds_left) + silence
                send({"running": one.name, "silence": silence, "limit": limit})
                for result in run_checks(subject, [one]):
                    send({"result": _as_json(result)})
        send({"episodes": len(subject.episodes)})


def _as_json(result: CheckResult) -> Message:
    return {**asdict(result), "findings": [finding.to_json() for finding in result.findings]}


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
