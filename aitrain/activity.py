"""Phase, progress count and rollout of each process of a run, in memory that the parent process reads.

So they are right even while a training process is stuck in C code and none of its threads can run.
"""

import ctypes
import math
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

VARIABLE = "AITRAIN_ACTIVITY"
"""Environment variable with the path of the file that is mapped."""
LONGEST_NAME = 192
"""Bytes of the name of a phase."""


class Snapshot(ctypes.Structure):
    """The activity of one process at one moment, or its slot in the memory of all."""

    count: int
    """Progress count."""
    allows: float
    """Seconds without progress, if the part of the run has its own deadline."""
    moves_files: bool
    """Whether it loads or saves files, for which the watchdog gives more time."""
    done: int
    """Number of finished conversations among the episodes of the rollout."""
    episodes: int
    """Number of episodes of the rollout; 0 while there is none."""
    tokens: int
    """Tokens sampled in these episodes so far."""
    since: float
    """When they began, in seconds since 1970."""
    phase: bytes
    _fields_ = (
        ("count", ctypes.c_uint64),
        ("allows", ctypes.c_double),
        ("since", ctypes.c_double),
        ("tokens", ctypes.c_uint64),
        ("done", ctypes.c_uint32),
        ("episodes", ctypes.c_uint32),
        ("moves_files", ctypes.c_bool),
        ("phase", ctypes.c_char * LONGEST_NAME),
    )

    @property
    def name(self) -> str:
        """What the process does."""
        return self.phase.decode(errors="replace") or "starting"


SLOT = ctypes.sizeof(Snapshot)
"""Bytes for one process."""
Memory: TypeAlias = bytearray | mmap.mmap


def read(memory: Memory, rank: int) -> Snapshot:
    """The activity of one of the processes that share a memory."""
    return Snapshot.from_buffer_copy(memory, rank * SLOT)


class Activity:
    """Phase and progress count of one process."""

    def __init__(self, memory: Memory, rank: int = 0) -> None:
        self.memory, self.rank = memory, rank
        """Memory of all processes that share it, and the slot of this one."""
        self.slot = Snapshot.from_buffer(memory, rank * SLOT)
        """This process's part of the memory."""
        self._parts = [("starting", 0.0, False)]
        """The phase, and the parts of it that are being done: what `Snapshot` says of each as phase, allows and
        moves_files."""
        self._write()

    def tick(self) -> None:
        """Progress: a step, a generated token, a finished call. Costs well under a microsecond."""
        self.slot.count += 1

    def enter(self, name: str, moves_files: bool = False) -> None:
        """Start the next phase of the run."""
        self._parts[0] = name, 0.0, moves_files
        self._write()
        self.tick()

    @contextmanager
    def doing(self, name: str, *, moves_files: bool = False) -> Iterator[None]:
        """A part of the phase, whose start and end count as progress."""
        with self.waiting(name, moves_files=moves_files):
            self.tick()
            yield
        self.tick()

    @contextmanager
    def waiting(self, name: str, allows: float = 0.0, *, moves_files: bool = False) -> Iterator[None]:
        """A wait, which may have its own deadline; its start and end do not count as progress."""
        part = f"{self._parts[0][0]}, {name}", allows, moves_files
        self._parts.append(part)
        self._write()
        try:
            yield
        finally:
            self._parts.remove(part)
            self._write()

    @contextmanager
    def rollout(self, episodes: int) -> Iterator[None]:
        """A rollout of this number of episodes, each of which calls `end_episode`. There may be several at once: one of
        the next batch, one of held-out cases."""
        slot = self.slot
        if not slot.episodes:
            slot.tokens, slot.since, slot.done = 0, time.time(), 0
        slot.episodes += episodes
        try:
            yield
        finally:
            slot.episodes -= episodes
            slot.done = max(0, slot.done - episodes)  # fewer if one failed

    def end_episode(self) -> None:
        """Count an episode of a rollout whose conversation is over."""
        self.slot.done += 1

    def add_tokens(self, count: int) -> None:
        """Count tokens that the policy sampled, which are progress."""
        self.slot.tokens += count
        self.tick()

    def _write(self) -> None:
        slot = self.slot
        name, slot.allows, slot.moves_files = self._parts[-1]
        slot.phase = name.encode()[:LONGEST_NAME]


own = Activity(bytearray(SLOT))
"""The activity of this process."""


def share(rank: int) -> None:
    """Share the activity of this process with the parent, if VARIABLE is set."""
    global own
    if path := os.environ.get(VARIABLE):
        with suppress(OSError), open(path, "r+b") as file:  # gone: of another run
            own = Activity(mmap.mmap(file.fileno(), 0), rank)


def tick(*_: object) -> None:
    """Count progress of this process. Takes any arguments, so that it can be a hook."""
    own.tick()


def rollouts() -> Snapshot:
    """The rollouts of the processes that share the memory, as one; without episodes if none are played."""
    processes = len(own.memory) // SLOT
    found = [seen for rank in range(processes) if (seen := read(own.memory, rank)).episodes]
    return Snapshot(
        done=sum(seen.done for seen in found),
        episodes=sum(seen.episodes for seen in found),
        tokens=sum(seen.tokens for seen in found),
        since=min((seen.since for seen in found), default=math.inf),
    )
