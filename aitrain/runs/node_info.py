"""The machines of a run, as status.json lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aitrain.runs.json_values import as_int, as_text


@dataclass(frozen=True)
class NodeInfo:
    """One of several machines that train together."""

    rank: int
    """Number of the machine, 0 for the first one."""
    host: str
    address: str
    """As the other machines reach it; empty if unknown."""
    gpus: int
    """Number of GPUs that the training uses on it."""
    pids: tuple[int, ...]
    """Its training processes, by their ranks."""


def _ids(given: object) -> tuple[int, ...]:
    return tuple(pid for pid in given if isinstance(pid, int)) if isinstance(given, list) else ()


def read_nodes(status: Mapping[str, object]) -> tuple[NodeInfo, ...]:
    """The machines in a status.json; none for a run on one machine."""
    given = status.get("nodes")
    entries = [entry for entry in given if isinstance(entry, dict)] if isinstance(given, list) else []
    return tuple(
        NodeInfo(
            rank=as_int(entry.get("rank")) or 0,
            host=as_text(entry.get("host")),
            address=as_text(entry.get("address")),
            gpus=as_int(entry.get("gpus")) or 0,
            pids=_ids(entry.get("pids")),
        )
        for entry in entries
    )
