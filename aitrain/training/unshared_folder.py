"""Sends files between machines that do not share the run folder: the run folder is the one that rank 0 sees.

Another machine has a folder of its own. Rank 0 writes the rollouts of its ranks, and gets the files that it adds to a
checkpoint; a checkpoint that is loaded is sent to it. All of this goes over the process group, so every rank must call
these methods. If all machines share the folder, they send nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object

from aitrain import activity
from aitrain.events import OWN_FOLDER_VARIABLE

CHUNK = 32 << 20
"""Bytes that are sent at once."""
RECEIVED = ".received-"
"""Prefix of the folder beside checkpoints/ with the checkpoint that rank 0 has sent."""


@dataclass(frozen=True)
class UnsharedFolder:
    """The ranks that do not see the run folder."""

    ranks: frozenset[int] = frozenset()
    leaders: tuple[int, ...] = ()
    """The first rank of each machine with a folder of its own: it sends and writes the machine's files."""

    @classmethod
    def find(cls) -> UnsharedFolder:
        """Ask every rank whether its machine has a folder of its own. Call it when the process group is started."""
        state, has_own = PartialState(), OWN_FOLDER_VARIABLE in os.environ
        found = gather_object([(state.process_index, state.local_process_index)] if has_own else [])
        return cls(frozenset(rank for rank, _ in found), tuple(rank for rank, local in found if local == 0))

    @property
    def is_leader(self) -> bool:
        """Whether this rank writes the files of a machine with a folder of its own."""
        return PartialState().process_index in self.leaders

    def collect_text(self, text: str) -> dict[int, str]:
        """The texts that this rank has to write, by the rank that each is of."""
        state = PartialState()
        rank = state.process_index
        if not self.ranks:
            return {rank: text}
        texts = [""] * state.num_processes if rank == 0 else None
        torch.distributed.gather_object(text if rank in self.ranks else "", texts, dst=0)
        sent = {other: texts[other] for other in sorted(self.ranks)} if texts else {}
        return sent if rank in self.ranks else {rank: text, **sent}

    def clean(self, folder: Path) -> None:
        """Delete a folder that a killed process has left on other machines."""
        if self.is_leader:
            shutil.rmtree(folder, ignore_errors=True)
        if self.leaders:
            PartialState().wait_for_everyone()

    def collect_files(self, folder: Path) -> None:
        """Move the files that other machines have below a folder, and rank 0 has not, to rank 0."""
        for leader in self.leaders:
            is_leader = PartialState().process_index == leader
            found = _from_rank(leader, _files(folder) if is_leader else [])
            missing = _from_rank(0, [(name, size) for name, size in found if not (folder / name).exists()])
            _send(leader, missing, folder, writes=PartialState().is_main_process)
            if is_leader:
                for name, _ in missing:
                    (folder / name).unlink()
                for place in sorted((path for path in (folder, *folder.rglob("*")) if path.is_dir()), reverse=True):
                    with suppress(OSError):  # not empty
                        place.rmdir()

    def send_checkpoint(self, checkpoint: Path) -> Path:
        """Send rank 0's checkpoint to the other machines; returns where it is on this one."""
        state = PartialState()
        if not self.ranks:
            return checkpoint
        files, place = _from_rank(0, _files(checkpoint) if state.is_main_process else []), checkpoint
        if state.process_index in self.ranks:
            leader = state.process_index - state.local_process_index  # machines may share a folder that is not rank 0's
            place = checkpoint.parent.parent / f"{RECEIVED}{leader}" / checkpoint.name
        if self.is_leader:
            shutil.rmtree(place.parent, ignore_errors=True)
        with activity.own.doing("sending a checkpoint", moves_files=True):
            _send(0, files, place, writes=self.is_leader)
        state.wait_for_everyone()
        return place


def _files(folder: Path) -> list[tuple[str, int]]:
    """Relative path and size of each file below a folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]


def _from_rank(rank: int, files: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """The list of one rank, on all ranks."""
    lists = [files]
    broadcast_object_list(lists, from_process=rank)
    return lists[0]


def _send(source: int, files: Sequence[tuple[str, int]], folder: Path, *, writes: bool) -> None:
    """Send files below the source's folder to all ranks; those that write do so below their own."""
    state = PartialState()
    is_source = state.process_index == source
    for name, size in files:
        with ExitStack() as stack:
            reader = stack.enter_context((folder / name).open("rb")) if is_source else None
            if writes:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
            writer = stack.enter_context((folder / name).open("wb")) if writes else None
            for start in range(0, size, CHUNK):
                content = bytearray(min(CHUNK, size - start))
                if reader is not None:
                    reader.readinto(content)
                chunk = torch.frombuffer(content, dtype=torch.uint8).to(state.device)
                torch.distributed.broadcast(chunk, source)
                if writer is not None:
                    writer.write(chunk.cpu().numpy().data)
