"""The watchdog: notices that a run makes no progress, and says what hangs and what was saved.

A run stalls when none of its processes has made progress for `--stall-timeout` seconds. One that waits for a slow one
does not stall; when one hangs, the others soon wait for it, and then none makes progress.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from aitrain.activity import Snapshot
from aitrain.checkpoint import checkpoints_of, step_of
from aitrain.run_folder import RunFolder, read_object

LONGEST_POLL = 2.0
"""Seconds between two looks; a quarter of a short timeout."""
DUMP = signal.SIGQUIT
"""The signal on which a training process writes the stacks of its threads to train.log."""
DUMP_SECONDS = 3.0
"""The longest that this may take: a process in an uninterruptible system call never does it."""
BYTES = 8 << 20
"""Bytes read or written that count as progress where files are moved. A heartbeat needs hours for as many."""
MARGIN = 10.0
"""Seconds that a deadline of its own may be overdue: the grace period, and a busy machine."""


@dataclass(frozen=True)
class Stall:
    """No process made progress for `seconds`. `ranks` are those that hang, as far as can be told from those that wait
    for them; `phase` is what the first of them was doing."""

    ranks: tuple[int, ...]
    phase: str
    seconds: float


class IdleClock:
    """Seconds without progress. It stands still while this process does: SIGSTOP or a suspended machine is no stall."""

    def __init__(self, poll: float) -> None:
        self.seconds = 0.0
        self._poll = poll
        self._last = time.monotonic()

    def look(self, has_progressed: bool) -> float:
        """The seconds as of now."""
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        self.seconds = 0.0 if has_progressed else self.seconds + min(elapsed, 2 * self._poll)
        return self.seconds


@dataclass
class _Process:
    """One training process, as the watchdog sees it."""

    rank: int
    idle: IdleClock
    seen: Snapshot | None = None
    pid: int | None = None
    moved: int = 0

    def look(self, now: Snapshot, is_halted: bool) -> None:
        """Compare with the last look. A process that is halted need not progress."""
        before, self.seen = self.seen, now
        self.idle.look(is_halted or before is None or before.count != now.count or self._moves_files(now))

    def _moves_files(self, now: Snapshot) -> bool:
        if not now.part.moves_files or self.pid is None:
            return False
        moved = _bytes_moved(self.pid)
        if moved < self.moved + BYTES:
            return False
        self.moved = moved
        return True

    def is_stalled(self, timeout: float) -> bool:
        allows = self.seen.part.allows if self.seen else 0.0
        return self.idle.seconds >= max(timeout, allows + MARGIN if allows else 0.0)


@dataclass
class Watchdog:
    """Watches the processes of one run in a thread of its own, from `start` to `stop`.

    `read` gives the activity of a rank, `on_stall` is called once, in the thread.
    """

    timeout: float
    processes: int
    read: Callable[[int], Snapshot]
    on_stall: Callable[[Stall], None]
    pids: dict[int, int] = field(default_factory=dict)
    """Process ids by rank, as far as they are known."""
    waits: Callable[[int, Snapshot], bool] = lambda rank, seen: False
    """Whether a stalled rank merely waits for another one; it may write down its stacks to find out."""

    def __post_init__(self) -> None:
        self._poll = min(LONGEST_POLL, self.timeout / 4)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        """Begin to watch, once."""
        if not self._thread.is_alive():
            self._thread.start()
        return self

    def stop(self) -> None:
        """The run is over, or has failed for another reason."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Watchdog:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _watch(self) -> None:
        watched = [_Process(rank, IdleClock(self._poll)) for rank in range(self.processes)]
        while not self._over.wait(self._poll):
            if self._is_stalled(watched):
                stall = self._judged(watched)
                if self._is_stalled(watched):  # still: the signal for the stacks may have ended the wait
                    self.on_stall(stall)
                    return

    def _is_stalled(self, watched: Sequence[_Process]) -> bool:
        is_halted = self._is_halted()
        for process in watched:
            process.pid = self.pids.get(process.rank)
            process.look(self.read(process.rank), is_halted)
        return all(process.is_stalled(self.timeout) for process in watched)

    def _is_halted(self) -> bool:
        """Whether all processes were stopped on purpose: by SIGSTOP, or a debugger."""
        return bool(self.pids) and all(is_halted(pid) for pid in self.pids.values())

    def _judged(self, watched: Sequence[_Process]) -> Stall:
        """Those that do not wait for another one hang; the phase is that of the one which stopped first."""
        first = sorted(watched, key=lambda process: -process.idle.seconds)
        waiting = {process.rank for process in first if process.seen and self.waits(process.rank, process.seen)}
        hanging = [process for process in first if process.rank not in waiting] or first
        phase = hanging[0].seen.part.name if hanging[0].seen else "starting"
        return Stall(tuple(sorted(p.rank for p in hanging)), phase, min(p.idle.seconds for p in watched))


def message(stall: Stall, folder: RunFolder, processes: int) -> str:
    """What the user is told: what hangs, what has been saved, how to continue."""
    ranks = f"{'rank' if len(stall.ranks) == 1 else 'ranks'} {' and '.join(map(str, stall.ranks))} of {processes}"
    who = "" if processes == 1 else f", {ranks}"
    step = read_object(folder.status).get("step")
    where = f" after step {step}" if step else ""
    saved = checkpoints_of(folder)
    command = f"aitrain grpo --config {shlex.quote(str(folder.config))}"
    return "\n".join(
        [
            f"The run stalled: no progress for {stall.seconds:.0f} seconds (--stall-timeout).",
            f"It hangs in: {stall.phase}{where}{who}. {folder.log} has the stacks of all threads.",
            f"Saved: {saved[0].name} (step {step_of(saved[0])}). Continue with:"
            if saved
            else "Nothing is saved yet. Start again with:",
            f"  {command} --resume" if saved else f"  {command}",
        ]
    )


# -- stacks


def ask_for_stacks(log: Path, rank: int, pid: int, seen: Snapshot) -> str:
    """Have a training process write the stacks of its threads to the log; returns what it wrote, which is nothing where
    a system call cannot be interrupted.

    Raises:
        OSError: the log cannot be written.
    """
    with log.open("ab") as file:
        file.write(f"\nStalled: rank {rank}, process {pid}, {seen.part.name}. Stacks of all threads:\n".encode())
        start = file.tell()
    with suppress(ProcessLookupError):
        os.kill(pid, DUMP)
    size, deadline = start, time.monotonic() + DUMP_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, size = size, log.stat().st_size
        if start < size == before:
            break
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def write_stacks(log: Path, title: str) -> None:
    """The stacks of all threads of this process, to the log."""
    with log.open("a", encoding="utf-8") as file:
        file.write(f"\n{title}. Stacks of all threads:\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def waits_for_another_rank(stacks: str) -> bool:
    """Whether the main thread is in a collective operation, by what faulthandler wrote: it lists the main thread last,
    or as the current one."""
    threads = re.split(r"\n\s*\n", stacks)
    current = [thread for thread in threads if "Current thread" in thread] or threads[-1:]
    return any("/torch/distributed/" in line for thread in current for line in thread.splitlines()[:12])


# -- processes, as psutil sees them: imported when needed, as light commands import this module


def descendants(pids: Sequence[int]) -> list[int]:
    """All processes below these, each after its parent."""
    import psutil

    found: dict[int, None] = {}
    for pid in pids:
        with suppress(psutil.Error):
            found |= dict.fromkeys(child.pid for child in psutil.Process(pid).children(recursive=True))
    return [pid for pid in found if pid not in pids]


def is_halted(pid: int) -> bool:
    """Whether SIGSTOP or a debugger has stopped a process."""
    import psutil

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _bytes_moved(pid: int) -> int:
    """Bytes that a process has read and written so far, files and pages of files; 0 where that is not shown."""
    import psutil

    try:
        moved = psutil.Process(pid).io_counters()
    except (psutil.Error, AttributeError, RuntimeError):  # not ours to see; not on macOS; empty while it ends
        return 0
    return int(moved.read_chars + moved.write_chars + moved.read_bytes + moved.write_bytes)
