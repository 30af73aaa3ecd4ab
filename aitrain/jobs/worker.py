"""The process of a training or an eval: `python -m aitrain.jobs.worker RUN_FOLDER EPOCH [CHECKPOINT [anyway]]`.

Runs alone, or as one rank of several (RANK, WORLD_SIZE). Events go to the parent through the original standard output;
everything that libraries and the environment print goes to train.log. Exits with 0 after a run, and with the error's
exit code after a failure.
"""

import atexit
import faulthandler
import importlib
import multiprocessing.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, TextIO

from aitrain import activity
from aitrain.environment.runner import EnvRunner
from aitrain.errors import to_aitrain_error, write_error_file
from aitrain.events import (
    BYE,
    COMMAND_VARIABLE,
    DRY_RUN_VARIABLE,
    LAUNCHER_VARIABLE,
    SERVER_VARIABLE,
    Event,
    Failed,
    Phase,
    encode,
)
from aitrain.execution.process_tree import end_with_parent, on_stop_signals
from aitrain.jobs.env_loading import load_runner
from aitrain.options.reading import resolve
from aitrain.options.train import EvalConfig, TrainConfig
from aitrain.redaction import RedactedStream
from aitrain.runs.heartbeat import Heartbeat, Progress
from aitrain.runs.new_folder import inherit_lock
from aitrain.runs.result import JOB as EVAL
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.runs.watchdog import DUMP

COMMAND_SECONDS = 60.0
"""Seconds for the command of a launched process to show the end of the run."""


@dataclass
class EventChannel:
    """Sends events to the parent process; calls `on_broken` when the parent is gone."""

    stream: TextIO
    rank: int
    on_broken: Callable[[], None] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Held while an event is written, as the heartbeat's thread sends some."""

    def __call__(self, event: Event) -> None:
        """Send an event; other ranks than the first send only Failed."""
        if self.rank != 0 and not isinstance(event, Failed):
            return
        try:
            with self._lock:
                self.stream.write(encode(event))
                self.stream.flush()
        except (BrokenPipeError, ValueError):
            self.on_broken()


def open_event_channel() -> EventChannel:
    """Reserve standard output for events, and redirect later prints to standard error, which is the log."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout, sys.stderr = RedactedStream(sys.stdout), RedactedStream(sys.stderr)
    return EventChannel(stream, int(os.environ.get("RANK", "0")))


def main(arguments: list[str], channel: EventChannel) -> int:
    """Run a training process; returns its exit code."""
    faulthandler.register(DUMP, file=2, all_threads=True)
    activity.share(channel.rank)
    try:
        inherit_lock()
        folder, progress = RunFolder(Path(arguments[0]), epoch=int(arguments[1])), Progress()
        with Heartbeat(folder, progress, channel.rank == 0, channel) as heartbeat:
            _work(arguments, folder, channel, heartbeat)
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exception(error)
        ours = to_aitrain_error(error)
        channel(Failed(str(ours), ours.exit_code))
        write_error_file(ours)
        return ours.exit_code
    return 0


def _work(arguments: list[str], folder: RunFolder, channel: EventChannel, heartbeat: Heartbeat) -> None:
    """Load the environment, then import torch and run: errors of the environment show within a second."""
    checkpoint = Path(arguments[2]) if len(arguments) > 2 else None
    is_eval = read_object(folder.status).get("job") == EVAL
    job: type[TrainConfig] = EvalConfig if is_eval else TrainConfig
    config = resolve(job, folder.config, {"resume_anyway": "anyway" in arguments[3:]})
    _enter("loading the environment", channel)
    runner = load_runner(config, channel)
    if channel.rank == 0 and isinstance(runner, EnvRunner):  # what each of several requires is in environment.json
        folder.write_config(runner.config)
    config = runner.config
    if url := os.environ.get(SERVER_VARIABLE):
        config = config.model_copy(update={"vllm_server_url": url})
    heartbeat.start()
    _enter("importing torch and transformers", channel)

    run = importlib.import_module("aitrain.jobs.evaluate" if is_eval else "aitrain.jobs.grpo").run
    from aitrain.jobs.env_loading import check_environments, describe_run
    from aitrain.training.distributed import shutdown_group
    from aitrain.training.run_context import RunContext, StopRequest

    stop = StopRequest()
    with on_stop_signals(stop.request):  # also from the supervisor of this process, if its command is killed
        channel.on_broken = stop.request
        if launcher := os.environ.get(LAUNCHER_VARIABLE):
            end_with_parent()  # the command's watchdog ends it if it hangs then
            if os.getppid() != int(launcher):
                stop.request()
        run(
            RunContext(
                config,
                folder,
                runner,
                channel,
                describe_run,
                stop,
                checkpoint,
                heartbeat.progress,
                check_environments,
                dry_run_of=int(os.environ.get(DRY_RUN_VARIABLE, "0")),
            )
        )
    shutdown_group()


def _enter(phase: str, channel: EventChannel) -> None:
    """Begin a phase in which files are read: the screen shows it, and the watchdog knows it."""
    activity.own.enter(phase, moves_files=True)
    channel(Phase(phase))


def exit_now(code: int, channel: EventChannel) -> NoReturn:
    """Run the atexit functions, in which trackers finish their runs, and end the process without Python's shutdown.

    The shutdown sometimes aborts while a library's thread is running, and it would wait forever for a thread that the
    environment left behind. So would the atexit function of multiprocessing for a process: it comes last, without any.
    """
    joins_processes = multiprocessing.util._exit_function  # type: ignore[attr-defined]
    atexit.unregister(joins_processes)
    atexit._run_exitfuncs()
    for process in multiprocessing.active_children():
        process.kill()
    joins_processes()
    sys.stdout.flush()
    sys.stderr.flush()
    if LAUNCHER_VARIABLE in os.environ:
        part_from_command(channel)
    os._exit(code)


def part_from_command(channel: EventChannel) -> None:
    """End as a process that a launcher started: its command shows the end of the run, for which the launcher waits."""
    with suppress(OSError, ValueError):
        channel.stream.write(f"{BYE}{channel.rank}\n")
        channel.stream.close()
    os.closerange(1, 3)  # the command reads the log to its end
    if command := os.environ.get(COMMAND_VARIABLE):
        deadline = time.monotonic() + COMMAND_SECONDS
        with suppress(ChildProcessError):
            while time.monotonic() < deadline and not os.waitpid(int(command), os.WNOHANG)[0]:
                time.sleep(0.05)


if __name__ == "__main__":
    opened = open_event_channel()
    exit_now(main(sys.argv[1:], opened), opened)
