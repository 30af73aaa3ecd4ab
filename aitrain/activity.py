"""Phase, progress count and rollout of each process of a run, in memory that the parent process reads.

So they are right even while a training process is stuck in C code and none of its threads can run.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path

VARIABLE = "AITRAIN_ACTIVITY"
"""Environment variable with the path of the file that is mapped."""
SLOT = 256
"""Bytes for one process."""
HEAD = struct.Struct("=Qd?")
"""Progress count, `allows` and `moves_files`."""
ROLLOUT = struct.Struct("=IIQdd")
"""The fields of RolloutProgress; the name of the phase follows."""


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a run. `allows`: seconds without progress, if the part has its own deadline. `moves_files`: bytes read
    or written count as progress."""

    name: str
    allows: float = 0.0
    moves_files: bool = False


@dataclass(frozen=True)
class RolloutProgress:
    """Episodes that are played at the same time: those whose conversation is over, all of them, the tokens sampled so
    far, and when it began and ended, in seconds since 1970; all 0 before the first rollout."""

    done: int = 0
    episodes: int = 0
    tokens: int = 0
    since: float = 0.0
    ended: float = 0.0
    """0 while it is played."""


@dataclass(frozen=True)
class Snapshot:
    """The activity of one process at one moment."""

    count: int
    part: Part
    rollout: RolloutProgress = RolloutProgress()


@dataclass(eq=False)
class PlayedEpisodes:
    """Counts the episodes of one rollout that are over."""

    episodes: int
    publish: Callable[[], None]
    done: int = 0

    def end(self, count: int = 1) -> None:
        """Count episodes whose conversation is over."""
        self.done += count
        self.publish()


class Activity:
    """Phase and progress count of one process."""

    def __init__(self, memory: bytearray | mmap.mmap, rank: int = 0) -> None:
        self.memory, self.rank = memory, rank
        """Memory of all processes that share it, and the slot of this one."""
        self._offset = rank * SLOT
        self._count = 0
        self._base = Part("starting")
        self._nested: list[Part] = []
        self._rollouts: list[PlayedEpisodes] = []  # several at once: one of the next batch, one of held-out cases
        self._tokens, self._since = 0, 0.0
        self._last = RolloutProgress()
        self._write()

    def tick(self) -> None:
        """Progress: a step, a generated token, a finished call. Costs well under a microsecond."""
        self._count += 1
        struct.pack_into("=Q", self.memory, self._offset, self._count)

    def enter(self, name: str, moves_files: bool = False) -> None:
        """Start the next phase of the run."""
        self._base = Part(name, moves_files=moves_files)
        self._write()
        self.tick()

    @contextmanager
    def doing(self, name: str, *, moves_files: bool = False) -> Iterator[None]:
        """A part of the phase, whose start and end count as progress."""
        with self._nesting(Part(name, moves_files=moves_files)):
            self.tick()
            yield
        self.tick()

    @contextmanager
    def waiting(self, name: str, allows: float) -> Iterator[None]:
        """A wait with its own deadline, whose start and end do not count as progress."""
        with self._nesting(Part(name, allows=allows)):
            yield

    @contextmanager
    def rollout(self, episodes: int) -> Iterator[PlayedEpisodes]:
        """A rollout of this number of episodes, which counts those that are over."""
        if not self._rollouts:
            self._tokens, self._since = 0, time.time()
        played = PlayedEpisodes(episodes, self._write_rollout)
        self._rollouts.append(played)
        self._write_rollout()
        try:
            yield played
        finally:
            self._last = replace(self._rollout(), ended=time.time())
            self._rollouts.remove(played)
            self._write_rollout()

    def add_tokens(self, count: int) -> None:
        """Count tokens that the policy sampled, which are progress."""
        self._tokens += count
        self._write_rollout()
        self.tick()

    def _rollout(self) -> RolloutProgress:
        if not (rollouts := list(self._rollouts)):
            return self._last
        done, episodes = sum(each.done for each in rollouts), sum(each.episodes for each in rollouts)
        return RolloutProgress(done, episodes, self._tokens, self._since)

    def _write_rollout(self) -> None:
        ROLLOUT.pack_into(self.memory, self._offset + HEAD.size, *astuple(self._rollout()))

    @contextmanager
    def _nesting(self, part: Part) -> Iterator[None]:
        self._nested.append(part)
        self._write()
        try:
            yield
        finally:
            self._nested.remove(part)
            self._write()

    def _write(self) -> None:
        inner = self._nested[-1] if self._nested else None
        part = self._base if inner is None else inner
        name = self._base.name if inner is None else f"{self._base.name}, {inner.name}"
        seen = Snapshot(self._count, Part(name, part.allows, part.moves_files), self._rollout())
        write(self.memory, self.rank, seen)


def write(memory: bytearray | mmap.mmap, rank: int, seen: Snapshot) -> None:
    """Write the activity of a process."""
    head = HEAD.pack(seen.count, seen.part.allows, seen.part.moves_files) + ROLLOUT.pack(*astuple(seen.rollout))
    room = SLOT - len(head)
    memory[rank * SLOT : (rank + 1) * SLOT] = head + seen.part.name.encode()[:room].ljust(room, b"\0")


def read(memory: bytearray | mmap.mmap, rank: int) -> Snapshot:
    """The activity of one of the processes that share a memory."""
    slot = bytes(memory[rank * SLOT : (rank + 1) * SLOT])
    count, allows, moves_files = HEAD.unpack_from(slot)
    rollout = RolloutProgress(*ROLLOUT.unpack_from(slot, HEAD.size))
    name = slot[HEAD.size + ROLLOUT.size :].rstrip(b"\0").decode(errors="replace")
    return Snapshot(count, Part(name or "starting", allows, moves_files), rollout)


class SharedMemory:
    """Memory for the activities of several processes: a mapped file, in /dev/shm where that exists, as writing to a
    full or lost disk would end or block the process."""

    def __init__(self, processes: int) -> None:
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, name = tempfile.mkstemp(prefix="aitrain-activity-", dir=in_memory)
        with os.fdopen(handle, "r+b") as file:
            file.write(bytes(SLOT * processes))  # allocates it
            file.flush()
            self.memory = mmap.mmap(file.fileno(), SLOT * processes)
        self.path = Path(name)

    def unlink(self) -> None:
        """Remove the file; processes that have opened it keep the memory."""
        self.path.unlink(missing_ok=True)


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


def add_tokens(count: int) -> None:
    """Count tokens that this process sampled."""
    own.add_tokens(count)


def rollouts() -> RolloutProgress:
    """The rollouts of the processes that share the memory, as one; empty if none is played. Processes that have ended
    theirs count while others still play."""
    found = [read(own.memory, rank).rollout for rank in range(processes())]
    begun = min((each.since for each in found if each.episodes and not each.ended), default=math.inf)
    together = [each for each in found if each.episodes and (not each.ended or each.ended > begun)]
    return RolloutProgress(
        sum(each.done for each in together),
        sum(each.episodes for each in together),
        sum(each.tokens for each in together),
        min((each.since for each in together), default=0.0),
    )


def processes() -> int:
    """Number of processes that share the memory."""
    return len(own.memory) // SLOT


def total() -> int:
    """Sum of the progress counts of these processes."""
    return sum(read(own.memory, rank).count for rank in range(processes()))
