"""What each process executes: `python -m aitrain.training.worker RUN_FOLDER [CHECKPOINT [anyway]]`.

It runs alone or under torchrun. Events go to the parent on what was standard output; everything that libraries and the
environment print goes to train.log. Exits 0 when the parent has been told how the run ended, and with the error's exit
code after a failure.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import random
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

import numpy

from aitrain import activity
from aitrain.environment.contract import check_methods
from aitrain.environment.finding import find
from aitrain.environment.loading import load
from aitrain.environment.scoring import host_of
from aitrain.errors import RunFailed, as_ours
from aitrain.events import SERVER_VARIABLE, Event, Failed, Started, encode
from aitrain.heartbeat import Heartbeat, Progress
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.privacy import MaskedStream
from aitrain.run_folder import RunFolder
from aitrain.watchdog import DUMP, Stall, Watchdog, descendants, write_stacks


@dataclass
class Channel:
    """The line to the parent. A parent that is gone asks the run to stop: nobody could watch or end it any more."""

    stream: TextIO
    rank: int
    on_broken: Callable[[], None] | None = None

    def __call__(self, event: Event) -> None:
        """Tell the parent. Only the first process speaks, except of its start and of what it died of."""
        if self.rank != 0 and not isinstance(event, (Started, Failed)):
            return
        try:
            self.stream.write(encode(event))
            self.stream.flush()
        except (BrokenPipeError, ValueError):
            self._tell_broken()

    def watch(self) -> None:
        """Notice at once that the parent is gone, also while there is nothing to tell it."""
        threading.Thread(target=self._wait_until_broken, name="parent-watch", daemon=True).start()

    def _wait_until_broken(self) -> None:
        """A pipe that nobody reads is in error; a file or a terminal never is."""
        poll = select.poll()
        poll.register(self.stream.fileno(), 0)
        poll.poll()
        self._tell_broken()

    def _tell_broken(self) -> None:
        if self.on_broken is not None:
            self.on_broken()


def open_channel() -> Channel:
    """Keep standard output for events, and send what is printed from now on to the log, as standard error is."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout, sys.stderr = MaskedStream(sys.stdout), MaskedStream(sys.stderr)
    return Channel(stream, int(os.environ.get("RANK", "0")))


def main(arguments: list[str], channel: Channel) -> int:
    """The whole life of a training process; returns its exit code."""
    faulthandler.register(DUMP, file=2, all_threads=True)
    activity.share(channel.rank)
    channel(Started(channel.rank, os.getpid()))
    try:
        folder, progress = RunFolder(Path(arguments[0])), Progress()
        with Heartbeat(folder, progress, is_heard=channel.rank == 0) as heartbeat:
            _work(arguments, folder, channel, heartbeat)
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exception(error)
        ours = as_ours(error)
        channel(Failed(str(ours), ours.exit_code))
        return ours.exit_code
    return 0


def _work(arguments: list[str], folder: RunFolder, channel: Channel, heartbeat: Heartbeat) -> None:
    """The environment is loaded before torch is: what is wrong with it is said within a second."""
    checkpoint = Path(arguments[1]) if len(arguments) > 1 else None
    config = resolve(TrainConfig, folder.config, {"resume_anyway": "anyway" in arguments[2:]})
    if url := os.environ.get(SERVER_VARIABLE):
        config = config.model_copy(update={"vllm_server_url": url})
    heartbeat.progress.stall_timeout = config.stall_timeout
    activity.own.enter("loading the environment", moves_files=True)
    random.seed(config.seed)
    numpy.random.seed(config.seed)
    environment = load(find(config), config.rl_env_config or {})
    check_methods(environment)
    host = host_of(environment, config, close=[channel.stream.fileno()])
    heartbeat.start()
    activity.own.enter("importing torch and TRL", moves_files=True)

    from aitrain.training.callbacks import StopRequest
    from aitrain.training.run import Job, part_in_peace, run

    watchdog = _own_watchdog(folder, config)

    def on_orphaned() -> None:
        stop.ask()
        watchdog.start()

    with StopRequest().on_signals() as stop:
        channel.on_broken = on_orphaned
        channel.watch()
        run(Job(config, folder, environment, channel, stop, checkpoint, host, heartbeat.progress))
    part_in_peace()


def _own_watchdog(folder: RunFolder, config: TrainConfig) -> Watchdog:
    """In the place of the parent's, once that is gone: a process that hangs could neither save nor end."""

    def on_stall(stall: Stall) -> None:
        with suppress(OSError):
            write_stacks(folder.log, f"Stalled without a parent: {stall.phase}")
            if activity.own.rank == 0:
                folder.write_status("stalled")
        for pid in descendants([os.getpid()]):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os._exit(RunFailed.exit_code)

    read, pids = partial(activity.read, activity.own.memory), {activity.own.rank: os.getpid()}
    return Watchdog(config.stall_timeout, activity.processes(), read, on_stall, pids)


def leave(code: int) -> NoReturn:
    """End this process at once, after what was registered for its end (trackers finish their runs there).

    Python's own shutdown now and then aborts where a library's thread is still running, and would wait for ever for a
    thread that the environment left behind.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(sys.argv[1:], open_channel()))
