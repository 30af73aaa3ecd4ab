"""Writes status.json with a heartbeat every two seconds and the machines of the run, and tells whether a run is
alive."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType

from aitrain import activity
from aitrain.errors import Interrupted, to_aitrain_error
from aitrain.events import Announce, Playing
from aitrain.runs.json_values import as_float, regular
from aitrain.runs.new_folder import LOCK, lock_file
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
    """Where the run is, and when it was there, for status.json."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "heartbeat": time.time()}


def is_alive(folder: RunFolder, status: Mapping[str, object]) -> bool:
    """Whether a run has not ended: by the lock of its folder, which its processes hold, if it is on this machine, else
    by its last heartbeat."""
    if status.get("host") == socket.gethostname():
        with suppress(OSError), open(folder.path / LOCK, "rb", opener=regular) as file:
            is_free = lock_file(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared with others that look
            if is_free is not None:
                return not is_free
    heartbeat = as_float(status.get("heartbeat"))
    return heartbeat is not None and time.time() - heartbeat < SILENCE


def state_of(folder: RunFolder, status: Mapping[str, object]) -> str:
    """The status of a run, given its status.json: running, finished, failed, stopped, stalled (it made no progress and
    was ended), dead (recorded as running, but its processes are gone), or unknown."""
    recorded = status.get("status")
    if recorded == "running":
        return "running" if is_alive(folder, status) else "dead"
    return str(recorded) if recorded in ENDED else "unknown"


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
