"""The machines of a run, for status.json."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter

from aitrain.runs.json_values import JsonObject

VARIABLE = "AITRAIN_NODES"
"""Environment variable by which the parent of rank 0 passes the machines to it."""


@dataclass(frozen=True)
class NodeInfo:
    """A machine of a run."""

    rank: int
    host: str
    address: str
    gpus: int
    pids: tuple[int, ...] = ()
    """Its training processes, in the order of their ranks."""


NODES = TypeAdapter(tuple[NodeInfo, ...])


def as_json(nodes: Iterable[NodeInfo]) -> list[dict[str, object]]:
    """The machines as status.json holds them."""
    return [asdict(node) for node in nodes]


def given_nodes(pids: Sequence[int]) -> list[NodeInfo]:
    """The machines that the parent passed, with the process ids of all ranks; none for a run on one machine."""
    nodes = [NodeInfo(**given) for given in json.loads(os.environ.get(VARIABLE, "[]"))]
    each = len(pids) // max(1, len(nodes))
    return [replace(node, pids=tuple(pids[each * n : each * (n + 1)])) for n, node in enumerate(nodes)]


def read_nodes(status: JsonObject) -> tuple[NodeInfo, ...]:
    """The machines in a status.json, none if it is damaged, or for a run on one machine."""
    try:
        return NODES.validate_python(status.get("nodes", ()))
    except ValueError:
        return ()
