"""The connection to a Ray cluster, and its machines."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from aitrain.errors import ConfigError, Interrupted

REACH_SECONDS = 10.0
QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a training process is started in the directory of the command
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_ROTATION_MAX_BYTES": str(8 << 20),  # of each log of a cluster that we start
    "RAY_ROTATION_BACKUP_COUNT": "1",
    "RAY_worker_niceness": "0",  # of a cluster that we start; Ray gives training a lower priority than other programs
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Settings of Ray; those of the user win."""


@contextmanager
def connected(address: str | None, may_start: bool = False) -> Iterator[None]:
    """Connect to the cluster at an address, the one of RAY_ADDRESS, one that runs on this machine, or if `may_start`, a
    new one that ends with the context.

    Raises:
        ConfigError: there is no cluster at the address.
        Interrupted: SIGTERM came meanwhile.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    with ExitStack() as stack:
        stack.callback(_disconnect)
        wanted = address or os.environ.get("RAY_ADDRESS")
        try:
            _connect(wanted or "auto")
        except Interrupted:
            raise
        except Exception as error:  # also of authentication, and RuntimeError for another version of Ray
            if wanted or not may_start or not isinstance(error, (ConnectionError, ValueError)):
                why = " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"ray_address: this machine cannot join a Ray cluster{f' at {wanted}' if wanted else ''}\n"
                    "Start Ray here first (ray start --head, or ray start --address=HOST:6379), or submit the command"
                    " with ray job submit.\nFor a cluster with a token, set the variable RAY_AUTH_MODE=token.\n"
                    f"Ray says: {why}"
                ) from None
            folder = tempfile.mkdtemp(prefix="aitrain-ray-")  # a short path, as Ray's sockets are in it
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            stack.callback(_disconnect)
            _connect("local", include_dashboard=False, _temp_dir=folder)
        yield


def _connect(address: str, **settings: Any) -> None:
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    if address != "local" and "://" not in address:
        _reach(canonicalize_bootstrap_address(address) or "")
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", **settings)
    except SystemExit:  # by Ray's own handler of SIGTERM
        raise Interrupted("Stopped.") from None


def _reach(address: str) -> None:
    """Check that something listens at an address; Ray would wait for it without an end, and Ctrl-C does not end that.

    Raises:
        ConnectionError: nothing does, or there is no such machine.
    """
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {address} ({error.strerror or error})") from None


def _disconnect() -> None:
    with suppress(Exception):  # such as an import that Ctrl-C has ended halfway
        import ray

        ray.shutdown()


def machines() -> list[dict[str, Any]]:
    """The living machines of the cluster, as Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def has_gpus() -> bool:
    """Whether a machine of the cluster has GPUs."""
    return any(machine["Resources"].get("GPU") for machine in machines())
