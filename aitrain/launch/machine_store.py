"""What the processes and machines of a run tell each other before and beside the training: JSON in torch's TCPStore.

The store has no authentication: whoever reaches its port can read and write it, so no secret is put there.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from aitrain.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL = 0.1
"""Seconds between two looks for a value."""
TRY_SECONDS = 5.0
"""Seconds of one attempt to connect; Ctrl-C is heard between two."""
ANSWER_SECONDS = 60.0
"""Maximum seconds for the store to answer."""


class StoreLostError(RunFailed):
    """The store does not answer: its machine or the connection to it is lost."""


@contextmanager
def _lost_if_silent() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise StoreLostError("The store of the run is gone") from error


class MachineStore:
    """Values by name, for all processes that are connected. Every method raises StoreLostError if the store is gone."""

    def __init__(self, store: Store, prefix: str = "aitrain") -> None:
        self._store, self._prefix = store, prefix

    def below(self, start: int) -> MachineStore:
        """The same store with names of its own, for one of several starts of the processes."""
        return MachineStore(self._store, f"{self._prefix}/{start}")

    def put(self, name: str, value: object) -> None:
        """Set a value."""
        with _lost_if_silent():
            self._store.set(f"{self._prefix}/{name}", json.dumps(value))

    def get(self, name: str) -> Any:
        """A value; None if it is not set yet."""
        key = f"{self._prefix}/{name}"
        with _lost_if_silent():
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def is_first(self, name: str) -> bool:
        """Whether no other process has asked this."""
        with _lost_if_silent():
            return self._store.add(f"{self._prefix}/{name}", 1) == 1


def serve_store(address: str, port: int, is_local: bool) -> MachineStore:
    """Run the store in this process; for one machine it listens on 127.0.0.1 only.

    Raises:
        ConfigError: the port is in use.
    """
    from torch._C._distributed_c10d import TCPStore  # here and below, because one process needs no store

    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server(("127.0.0.1" if is_local else "", port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"master_port: port {port} cannot be used on this machine: {error.strerror}\n"
            "Choose another with --master-port, on all machines."
        ) from None
    here = "127.0.0.1" if family == socket.AF_INET else "::1"
    timeout = timedelta(seconds=ANSWER_SECONDS)
    return MachineStore(
        TCPStore(here, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
    )


def join_store(address: str, port: int, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> MachineStore:
    """Connect to the store, which may not run yet. `meanwhile` is called between two attempts.

    Raises:
        ConfigError: nothing answers there within these seconds.
    """
    from torch._C._distributed_c10d import TCPStore

    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=TRY_SECONDS).close()
            store = TCPStore(address, port, None, False, timedelta(seconds=ANSWER_SECONDS), wait_for_workers=False)
            return MachineStore(store)
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        meanwhile()
        if time.monotonic() > deadline:
            raise ConfigError(
                f"master_addr: node 0 does not answer at {address}:{port}: {why}\n"
                "Start the command with --node-rank 0 there."
            )
        time.sleep(POLL)
