"""The watchdog: detects that a run makes no progress, and reports what hangs and what was saved.

A run stalls when none of its processes has made progress for `--stall-timeout` seconds. Ranks that wait for a slow rank
are no stall; when one rank hangs, the others soon wait for it, and none makes progress.
"""

import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aitrain.activity import Snapshot

LONGEST_POLL = 2.0
"""Maximum seconds between two polls; for short timeouts a quarter of the timeout."""
DUMP = signal.SIGQUIT
"""The signal on which a training process writes the stacks of its threads to train.log."""
DUMP_SECONDS = 2.0
"""Seconds in which a process writes its stacks; one in an uninterruptible system call writes none."""
WITH_FILES = 4
"""By which factor the timeout is longer in phases that load or save files, in which nothing is counted."""
LONGER = 4
"""By which factor the --stall-timeout that a message proposes is longer than the stall."""
MARGIN = 10.0
"""Seconds by which a wait with its own deadline may exceed it on a busy machine."""


@dataclass
class Watchdog:
    """Watches the processes of one run in a thread, from `start` to `stop`.

    `read` returns the activity of a rank; `on_stall` is called once, in the thread, with the error message.
    """

    timeout: float
    ranks: Sequence[int]
    world: int
    """Number of all ranks; where all of these wait, and there are others, the one that hangs is watched elsewhere."""
    read: Callable[[int], Snapshot]
    on_stall: Callable[[str], None]
    waits: Callable[[int, Snapshot], bool] = lambda rank, seen: False
    """Whether a stalled rank waits for another one; may make the process dump its stacks."""

    def __post_init__(self) -> None:
        self._poll = min(LONGEST_POLL, self.timeout / 4)
        self._seen = dict[int, Snapshot]()
        """The activity of each rank at the last poll."""
        self._idle = dict[int, float]()
        """Seconds of polls without progress, but not those in which the watchdog or the machine was suspended."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._over.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._poll):
            if self._is_stalled():
                stall = self._judged()
                if stall is None:
                    self._seen.clear()
                elif self._is_stalled():  # again, as the signal for the stacks may have ended the wait
                    self.on_stall(stall)
                    return

    def _is_stalled(self) -> bool:
        """Look at all processes: whether each has made no progress for longer than the timeout, and than its wait with
        an own deadline may take."""
        is_stalled = True
        for rank in self.ranks:
            before, now = self._seen.get(rank), self.read(rank)
            has_progressed = before is None or before.count != now.count
            self._idle[rank] = 0.0 if has_progressed else self._idle[rank] + self._poll
            self._seen[rank] = now
            timeout = self.timeout * (WITH_FILES if now.moves_files else 1)
            is_stalled &= self._idle[rank] >= max(timeout, now.allows + MARGIN if now.allows else 0.0)
        return is_stalled

    def _judged(self) -> str | None:
        """Error message of the stall, which says what hangs; the command says how to continue. None if all of these
        ranks wait for one that is watched elsewhere."""
        first = sorted(self.ranks, key=lambda rank: -self._idle[rank])
        hanging = [rank for rank in first if not self.waits(rank, self._seen[rank])]
        if not hanging and len(self.ranks) < self.world:
            return None
        hanging, seconds = hanging or first, self._idle[first[-1]]
        who = "" if self.world == 1 else f", rank {' and '.join(map(str, sorted(hanging)))} of {self.world}"
        return (
            f"The run stalled: no progress for {seconds:.0f} seconds (--stall-timeout).\n"
            f"It hangs in: {self._seen[hanging[0]].name}{who}. train.log has the stacks of all threads.\n"
            f"If that is only slow, give it more time: --stall-timeout {max(60, LONGER * round(seconds, -1)):.0f}"
        )


# -- stacks


def ask_for_stacks(log: Path, rank: int, send: Callable[[signal.Signals], object], seen: Snapshot) -> str:
    """Make a training process, to which `send` sends a signal, write the stacks of its threads to the log; returns
    them, or empty text if the process is in an uninterruptible system call.

    Raises:
        OSError: the log cannot be written.
    """
    with log.open("ab") as file:
        file.write(f"\nStalled: rank {rank}, {seen.name}. Stacks of all threads:\n".encode())
        start = file.tell()
    send(DUMP)
    time.sleep(DUMP_SECONDS)
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def waits_for_another_rank(stacks: str) -> bool:
    """Whether the main thread is in a collective operation, by stacks of faulthandler, in which the main thread is the
    current one or the last one."""
    threads = re.split(r"\n\s*\n", stacks)
    current = [thread for thread in threads if "Current thread" in thread] or threads[-1:]
    return any("/torch/distributed/" in line for thread in current for line in thread.splitlines()[:12])
