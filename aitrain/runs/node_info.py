"""The machines of a run, for status.json."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace

VARIABLE = "AITRAIN_NODES"
"""Environment variable by which the parent of rank 0 passes the machines to it."""


@dataclass(frozen=True)
class NodeInfo:
    """A machine of a run."""

    rank: int
    host: str
    address: str
    gpus: int
    pids: list[int] = field(default_factory=list)
    """Its training processes, in the order of their ranks."""


def as_json(nodes: Iterable[NodeInfo]) -> list[dict[str, object]]:
    """The machines as status.json holds them."""
    return [asdict(node) for node in nodes]


def given_nodes(pids: Sequence[int]) -> list[dict[str, object]] | None:
    """The machines that the parent passed, with the process ids of all ranks; None for a run on one machine."""
    nodes = [NodeInfo(**given) for given in json.loads(os.environ.get(VARIABLE, "[]"))]
    if not nodes:
        return None
    each = len(pids) // len(nodes)
    return as_json(replace(node, pids=list(pids[each * n : each * (n + 1)])) for n, node in enumerate(nodes))
