"""Where the processes of a run fit on the machines of a Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from aitrain.execution.ray_connection import ClusterMachine


@dataclass(frozen=True)
class Bundle:
    """Resources that one process needs on one machine."""

    what: str
    """`training` or `vLLM server`."""
    needs: Mapping[str, float]


def placement(bundles: Sequence[Bundle], cluster: Sequence[ClusterMachine]) -> list[str] | None:
    """A machine for each bundle, as Ray packs them now; None if they do not fit."""
    left = [dict(machine.free) for machine in cluster]
    places = []
    for bundle in bundles:
        fitting = (n for n, free in enumerate(left) if all(free.get(k, 0.0) >= v for k, v in bundle.needs.items()))
        place = next(fitting, None)
        if place is None:
            return None
        for name, count in bundle.needs.items():
            left[place][name] -= count
        places.append(cluster[place].host)
    return places


def describe(bundles: Sequence[Bundle], cluster: Sequence[ClusterMachine]) -> tuple[str, bool]:
    """What a run needs, what the cluster has, and where it would be placed; and whether it fits now."""
    have = ", ".join(f"{machine.host} {_free(machine)}" for machine in cluster)
    places = placement(bundles, cluster)
    wanted = _wanted(bundles)
    if places is not None:
        hosts: dict[str, list[str]] = {}
        for host, bundle in zip(places, bundles, strict=True):
            hosts.setdefault(bundle.what, []).append(host)
        where = "; ".join(f"{what} on {', '.join(dict.fromkeys(names))}" for what, names in hosts.items())
        return f"Ray places {wanted}: {where}. Free: {have}.", True
    could = placement(bundles, [replace(machine, free=machine.total) for machine in cluster])
    why = "it is in use by others" if could is not None else "the cluster does not have that"
    return f"Ray cannot place {wanted} now: {why}. Free: {have}.\nThe run waits for it; Ctrl-C ends it.", False


def _wanted(bundles: Sequence[Bundle]) -> str:
    groups: dict[tuple[str, str], int] = {}
    for bundle in bundles:
        key = bundle.what, " and ".join(f"{count:g} {name}" for name, count in bundle.needs.items())
        groups[key] = groups.get(key, 0) + 1
    return ", ".join(f"{count} x {what} ({needs} each)" for (what, needs), count in groups.items())


def _free(machine: ClusterMachine) -> str:
    shown = [name for name in ("GPU", "CPU") if machine.total.get(name)]
    return " ".join(f"{machine.free.get(name, 0.0):g}/{machine.total[name]:g} {name}" for name in shown) or "nothing"
