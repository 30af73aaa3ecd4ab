"""The connection to a Ray cluster, and its machines."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aitrain.errors import ConfigError, Interrupted

REACH_SECONDS = 10.0
QUIET = {
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # a training process is started in the directory of the command
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Settings of Ray; those of the user win."""


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to the cluster at an address, the one of RAY_ADDRESS, or one that runs on this machine.

    Raises:
        ConfigError: there is no cluster.
        Interrupted: SIGTERM came meanwhile.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        try:
            import ray
            from ray._private.services import canonicalize_bootstrap_address

            if "://" not in wanted:
                _reach(canonicalize_bootstrap_address(wanted) or "")
            ray.init(wanted, log_to_driver=False, logging_level="ERROR")
        except SystemExit:  # by Ray's own handler of SIGTERM
            raise Interrupted("Stopped.") from None
        except Exception as error:  # also of authentication, and RuntimeError for another version of Ray
            raise ConfigError(
                f"ray_address: this machine cannot join a Ray cluster ({wanted})\n"
                "Start Ray here first (ray start --head, or ray start --address=HOST:6379), or submit the command"
                " with ray job submit.\nFor a cluster with a token, set the variable RAY_AUTH_MODE=token.\n"
                f"Ray says: {' '.join(str(error).split())[:200]}"
            ) from None
        yield
    finally:
        with suppress(Exception):  # such as an import that Ctrl-C has ended halfway
            ray.shutdown()


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


def machines() -> list[dict[str, Any]]:
    """The living machines of the cluster, as Ray describes them."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def has_gpus() -> bool:
    """Whether a machine of the cluster has GPUs."""
    return any(machine["Resources"].get("GPU") for machine in machines())
