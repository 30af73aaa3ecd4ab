"""A Ray cluster: the connection to it, its machines, and where the processes of a run fit."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aitrain.errors import ConfigError

QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a training process is started in the directory of the command
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_ROTATION_MAX_BYTES": str(8 << 20),  # of each log of a cluster that we start
    "RAY_ROTATION_BACKUP_COUNT": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Settings of Ray; those of the user win."""


@dataclass(frozen=True)
class Machine:
    """One machine of a cluster and its resources, such as CPU and GPU."""

    host: str
    address: str
    node_id: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True)
class Bundle:
    """Resources that one process needs on one machine."""

    what: str
    """`training` or `vLLM server`."""
    needs: Mapping[str, float]


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to the cluster at an address, the one of RAY_ADDRESS, one that runs on this machine, or a new one that
    ends with the context.

    Raises:
        ConfigError: there is no cluster at the address.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with ExitStack() as stack:
        stack.callback(_disconnect)
        wanted = address or os.environ.get("RAY_ADDRESS")
        try:
            _connect(wanted or "auto")
        except (ConnectionError, ValueError) as error:
            if wanted:
                raise no_cluster(wanted, error) from None
            folder = tempfile.mkdtemp(prefix="aitrain-ray-")  # a short path, as Ray's sockets are in it
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.callback(_disconnect)
            _connect("local", include_dashboard=False, _temp_dir=folder)
        yield


def _connect(address: str, **settings: Any) -> None:
    import ray

    with _silent():
        ray.init(address, log_to_driver=False, logging_level="ERROR", **settings)


def _disconnect() -> None:
    import ray

    with suppress(Exception):
        ray.shutdown()


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what Ray prints while it connects off the screen."""
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        before = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(nothing.fileno(), number)
        try:
            yield
        finally:
            for number, kept in zip((1, 2), before, strict=True):
                os.dup2(kept, number)
                os.close(kept)


def no_cluster(place: str, error: Exception) -> ConfigError:
    """The error of a cluster that does not answer."""
    why = " ".join(str(error).split())[:200]
    return ConfigError(
        f"ray_address: this machine cannot join the Ray cluster at {place}\n"
        "Start Ray here first (ray start --head, or ray start --address=HOST:6379), or submit the command with"
        f" ray job submit.\nRay says: {why}"
    )


def machines() -> list[Machine]:
    """The living machines of the cluster."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        Machine(
            node["NodeManagerHostname"],
            node["NodeManagerAddress"],
            node["NodeID"],
            _counts(node["Resources"]),
            _counts(free.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _counts(resources: Mapping[str, float]) -> dict[str, float]:
    """Without the names of machines, and memory in bytes."""
    return {name: count for name, count in resources.items() if ":" not in name and "memory" not in name}


def placement(bundles: Sequence[Bundle], cluster: Sequence[Machine]) -> list[str] | None:
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


def describe(bundles: Sequence[Bundle], cluster: Sequence[Machine]) -> tuple[str, bool]:
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
    could = placement(bundles, [Machine(m.host, m.address, m.node_id, m.total, m.total) for m in cluster])
    why = "it is in use by others" if could is not None else "the cluster does not have that"
    return f"Ray cannot place {wanted} now: {why}. Free: {have}.\nThe run waits for it; Ctrl-C ends it.", False


def _wanted(bundles: Sequence[Bundle]) -> str:
    groups: dict[tuple[str, str], int] = {}
    for bundle in bundles:
        key = bundle.what, " and ".join(f"{count:g} {name}" for name, count in bundle.needs.items())
        groups[key] = groups.get(key, 0) + 1
    return ", ".join(f"{count} x {what} ({needs} each)" for (what, needs), count in groups.items())


def _free(machine: Machine) -> str:
    shown = [name for name in ("GPU", "CPU") if machine.total.get(name)]
    return " ".join(f"{machine.free.get(name, 0.0):g}/{machine.total[name]:g} {name}" for name in shown) or "nothing"
