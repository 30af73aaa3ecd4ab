"""status.json: whether a run runs, how far it is, a sign of life every few seconds; and what that says from outside."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from aitrain import activity
from aitrain.errors import Interrupted
from aitrain.run_folder import RunFolder

BEAT = 2.0
"""Seconds between two signs of life."""
SILENCE = 60.0
"""Seconds without one after which a run on another machine counts as dead: its clock and its disk may lag."""


@dataclass
class Progress:
    """How far a run is. The training writes it, the heartbeat reads it."""

    status: str = "running"
    step: int | None = None
    steps: int | None = None
    pids: list[int] = field(default_factory=list)
    """The training processes, the first one first."""
    stall_timeout: float | None = None
    """Seconds without progress after which the run counts as stalled."""


class Heartbeat:
    """Keeps status.json fresh, also during a long step or a save; at the end it says how the run ended.

    The thread is started by `start`, after the environment's processes were forked: a fork copies what a thread locks.
    """

    def __init__(self, folder: RunFolder, progress: Progress, is_heard: bool = True) -> None:
        self.folder = folder
        self.progress = progress
        self.is_heard = is_heard
        self.over = threading.Event()
        self._count, self._progressed = -1, 0.0
        self.thread = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self.beat()
        return self

    def start(self) -> None:
        """From now on every few seconds."""
        if self.is_heard:
            self.thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        if error is not None and self.progress.status != "stalled":
            is_asked = isinstance(error, (Interrupted, KeyboardInterrupt))
            self.progress.status = "stopped" if is_asked else "failed"
        self.beat()

    def beat(self) -> None:
        """One sign of life. A disk that is full or gone for a moment is no reason to end a run."""
        if self.is_heard:
            progress = self.progress
            known = {"step": progress.step, "steps": progress.steps, "pids": progress.pids or None, **self._activity()}
            with suppress(OSError):
                self.folder.write_status(progress.status, **sign_of_life(), **known)

    def _activity(self) -> dict[str, Any]:
        """The phase, and when the run counts as stalled if nothing more happens."""
        if (count := activity.total()) != self._count:
            self._count, self._progressed = count, time.time()
        part = activity.read(activity.own.memory, activity.own.rank).part
        limit = self.progress.stall_timeout
        stalls_at = None if limit is None else round(self._progressed + max(limit, part.allows), 3)
        return {"phase": part.name, "stalls_at": stalls_at}

    def _keep_beating(self) -> None:
        while not self.over.wait(BEAT):
            self.beat()


def sign_of_life() -> dict[str, Any]:
    """This process in status.json, so that it cannot be taken for a later one with the same id."""
    started = _started(os.getpid())
    return {
        "pid": os.getpid(),
        "started": started,
        "host": socket.gethostname(),
        "machine": _machine(),
        "heartbeat": time.time(),
    }


def is_alive(status: Mapping[str, Any]) -> bool:
    """Whether the process that wrote it is still there: by its id and start on this machine, else by its silence."""
    machine = _machine()
    is_here = machine is not None and (status.get("machine"), status.get("host")) == (machine, socket.gethostname())
    pid, started = status.get("pid"), status.get("started")
    if is_here and isinstance(pid, int) and started is not None:
        return bool(_started(pid) == started)
    age = silence(status)
    return age is not None and age < SILENCE


def silence(status: Mapping[str, Any]) -> float | None:
    """Seconds since its last sign of life, None where it gave none."""
    heartbeat = status.get("heartbeat")
    is_number = isinstance(heartbeat, (int, float)) and not isinstance(heartbeat, bool)
    return max(0.0, time.time() - heartbeat) if is_number and heartbeat else None


def _started(pid: int) -> int | None:
    """Start time of a process in the kernel's ticks since boot; None if it is gone, or the kernel does not tell.

    psutil's create_time() counts from the wall clock, so it changes for a living process when the clock is set.
    """
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else int(after_name[19])
    except (OSError, ValueError, IndexError):
        return None


def _machine() -> str | None:
    """This boot of this machine and its space of process ids, where the kernel tells (containers have their own)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None
