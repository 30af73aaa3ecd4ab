"""Writes status.json with a heartbeat every two seconds and the machines of the run, and tells from it whether a run is
alive."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from aitrain import activity
from aitrain.errors import Interrupted, to_aitrain_error
from aitrain.events import Announce, Playing
from aitrain.runs.json_values import as_float
from aitrain.runs.run_folder import RunFolder

BEAT = 2.0
"""Seconds between two heartbeats."""
SILENCE = 60.0
"""Seconds without a heartbeat after which a run on another machine counts as dead; its clock and disk may lag."""

ENDED = ("finished", "failed", "stopped", "stalled")


@dataclass
class Progress:
    """Progress of a run, written by the training and read by the heartbeat."""

    status: str = "running"
    step: int | None = None
    steps: int | None = None
    ends_at: float | None = None
    """Estimated time of the last step, in seconds since 1970."""
    score_before: float | None = None
    """The held-out score before the training."""
    reason: str | None = None
    """Why the run failed."""
    seconds: float | None = None
    """Duration of an eval's episodes so far, over all starts."""


@dataclass(eq=False)
class Heartbeat:
    """Writes status.json every BEAT seconds, also during a long step or a save, and the run's final status.

    `start` starts the thread. Call it after forking the environment's processes, as a fork copies locks that a thread
    holds.
    """

    folder: RunFolder
    progress: Progress
    is_writer: bool = True
    announce: Announce = lambda event: None
    """Gets the progress of rollouts, from the heartbeat's thread."""

    def __post_init__(self) -> None:
        self._playing = Playing(0, 0, None)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self.beat()
        return self

    def start(self) -> None:
        """Write a heartbeat every BEAT seconds."""
        if self.is_writer:
            self.thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        if error is not None:
            ours = to_aitrain_error(error)
            self.progress.status = "stopped" if isinstance(ours, Interrupted) else "failed"
            self.progress.reason = str(ours)
        self.beat()

    def beat(self) -> None:
        """Write one heartbeat. Errors of the disk do not end the run."""
        if not self.is_writer:
            return
        known = asdict(self.progress)
        status = known.pop("status")
        known["phase"] = activity.own.slot.name
        with suppress(OSError):
            self.folder.write_status(status, **sign_of_life(), **known)

    def tell_rollout(self) -> None:
        """Announce the progress of the rollouts of all processes, if it has changed and they take seconds."""
        seen, before = activity.rollouts(), self._playing
        seconds = time.time() - seen.since
        self._playing = Playing(0, 0, None)
        if seen.episodes and seconds >= BEAT:
            rate = round(seen.tokens / seconds, 1) if seen.tokens else None
            self._playing = Playing(seen.done, seen.episodes, rate)
        if self._playing != before:
            self.announce(self._playing)

    def _keep_beating(self) -> None:
        while not self.over.wait(BEAT):
            self.tell_rollout()
            self.beat()


def sign_of_life() -> dict[str, object]:
    """Identity of this process for status.json: with its start time, as process ids are reused."""
    return {
        "pid": os.getpid(),
        "started": started_at(os.getpid()),
        "host": socket.gethostname(),
        "machine": _machine(),
        "heartbeat": time.time(),
    }


def is_alive(status: Mapping[str, object]) -> bool:
    """Whether the process that wrote a status runs: by id and start time if it is here, else by its last heartbeat."""
    pid, started = status.get("pid"), as_float(status.get("started"))
    if status.get("machine") == _machine() and isinstance(pid, int) and started is not None:
        now = started_at(pid)
        if now is None or abs(now - started) < SILENCE:
            return now is not None  # else the clock was set, or it is another process with this id
    heartbeat = as_float(status.get("heartbeat"))
    return heartbeat is not None and time.time() - heartbeat < SILENCE


def state_of(status: Mapping[str, object]) -> str:
    """The status of a run by its status.json: running, finished, failed, stopped, stalled (it made no progress and
    was ended), dead (recorded as running, but its process is gone), or unknown."""
    recorded = status.get("status")
    if recorded in ENDED:
        return str(recorded)
    if recorded != "running":
        return "unknown"
    return "running" if is_alive(status) else "dead"


def _machine() -> str:
    """Where process ids mean the same: this start of the machine and, on Linux, the container, which has the name of
    its machine with `docker run --network host`."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def started_at(pid: int) -> float | None:
    """Start time of a process, in seconds since 1970; None if there is no such process, or it is a zombie."""
    import psutil  # here, as only this needs it

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


# -- the machines of a run


@dataclass(frozen=True)
class NodeInfo:
    """A machine of a run."""

    rank: int
    host: str
    address: str
    gpus: int
    processes: int = 1
    """Number of its training processes."""
