"""The dry run of a training: `python -m aitrain.jobs.dry_run FOLDER PROCESSES [CHECKPOINT [anyway]]`.

Does what a training process does up to its first step, with the same functions and so with the same errors, except that
it reads no weights and starts no vLLM server. FOLDER holds config.yaml. Events go to the parent as in a training; what
cannot be known here is sent as `NotChecked`, and the last event is `Failed` or `Ended`.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import closing
from pathlib import Path

from aitrain.errors import Interrupted, to_aitrain_error
from aitrain.events import Ended, Failed, Phase
from aitrain.jobs.env_loading import load_runner
from aitrain.jobs.worker import EventChannel, exit_now, open_event_channel
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder


def main(arguments: list[str], channel: EventChannel) -> int:
    """Check one run; returns the exit code."""
    try:
        _check(arguments, channel)
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exception(error)
        ours = to_aitrain_error(error)
        channel(Failed(str(ours), ours.exit_code))
        return ours.exit_code
    channel(Ended("checked", 0))
    return 0


def _check(arguments: list[str], channel: EventChannel) -> None:
    """Load the environment, then import torch, as a training process does."""
    folder, processes = RunFolder(Path(arguments[0])), int(arguments[1])
    checkpoint = Path(arguments[2]) if len(arguments) > 2 else None
    config = resolve(TrainConfig, folder.config, {"resume_anyway": "anyway" in arguments[3:]})
    channel(Phase("loading the environment"))
    with closing(load_runner(config, channel, [channel.stream.fileno()])) as runner:
        channel(Phase("importing torch and TRL"))

        from aitrain.jobs.environment_check import refuse_unscorable
        from aitrain.training.dry_run import check_run
        from aitrain.training.run_context import RunContext

        context = RunContext(runner.config, folder, runner, channel, checkpoint=checkpoint)
        check_run(context, processes, lambda cases: refuse_unscorable(context, cases))


if __name__ == "__main__":
    own_channel = open_event_channel()
    own_channel.on_broken = lambda: os._exit(Interrupted.exit_code)  # the parent has ended
    own_channel.watch()
    exit_now(main(sys.argv[1:], own_channel))
