"""A Ray actor that runs the environment's processes of one machine, and its handle in the training process."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.fork_server import EnvCommand
from aitrain.execution.message_socket import MessageSocket
from aitrain.execution.processes import ProcessPool, WorkerLease


class EnvHost:
    """Starts the fork server of the environment on its machine, and passes calls on to processes that it forks.

    Its methods run in threads, several at the same time. A plain class, so that it runs in tests without Ray.
    """

    def __init__(self, command: EnvCommand, files: dict[str, bytes], attributes: dict[str, bytes]) -> None:
        self._stored: set[Path] = set()
        self.store(files)
        self._leases: dict[int, WorkerLease] = {}
        self._lock = threading.Lock()
        self._pool = start_pool(command)
        self._pool.update(attributes)

    def store(self, files: dict[str, bytes]) -> None:
        """Write files that are not on this machine; they are deleted at the end."""
        for path in map(Path, files):
            if not path.exists():
                self._stored.add(path)
                path.write_bytes(files[str(path)])

    def place(self) -> str:
        """Name of the machine, when the environment is ready."""
        return socket.gethostname()

    def update(self, attributes: dict[str, bytes]) -> None:
        """See ProcessPool.update."""
        self._pool.update(attributes)

    def exchange(self, lease: int, message: bytes) -> bytes | Failure:
        """Pass a pickled request on to the process of a lease, which is started with its first request."""
        try:
            with self._lock:
                held = self._leases.get(lease)
            if held is None:
                held = self._pool.lease(None)
                with self._lock:
                    self._leases[lease] = held
            return held.exchange(message)
        except CallFailed as error:
            return error.failure

    def end(self, lease: int, failure: Failure) -> None:
        """End the call of a lease."""
        with self._lock:
            held = self._leases.get(lease)
        if held is not None:
            held.end(failure)

    def stack(self, lease: int) -> list[tuple[str, int, str]]:
        """The stack of the user's code, as file, line and name of each frame."""
        with self._lock:
            held = self._leases.get(lease)
        frames: Sequence[FrameSummary] = () if held is None else held.stack()
        return [(frame.filename, frame.lineno or 0, frame.name) for frame in frames]

    def release(self, lease: int, is_spent: bool = False) -> None:
        """Release a lease; see Lease.release."""
        with self._lock:
            held = self._leases.pop(lease, None)
        if held is not None:
            held.release(is_spent)

    def lease_idle(self, numbers: Sequence[int]) -> int:
        """Lease the idle processes under these numbers; returns how many there are."""
        idle = self._pool.lease_idle(None)
        for lease in idle[len(numbers) :]:
            lease.release()
        with self._lock:
            self._leases.update(zip(numbers, idle, strict=False))
        return min(len(idle), len(numbers))

    def close(self) -> None:
        """End all processes."""
        for lease in list(self._leases):
            self.release(lease)
        self._pool.close()
        for path in self._stored:
            path.unlink(missing_ok=True)


def start_pool(command: EnvCommand) -> ProcessPool:
    """A pool whose fork server is a new process that loads the environment.

    Raises:
        CallFailed: the environment cannot be loaded.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [*command.arguments, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=command.folder,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    messages = MessageSocket(ours)
    messages.send(command.request)
    answer, _ = messages.receive()
    if answer != b"":
        ours.close()
        process.wait()
        why = "its process ended" if answer is None else answer.decode(errors="replace")
        raise CallFailed(Failure("crashed", f"the environment cannot be loaded on {socket.gethostname()}: {why}"))
    return ProcessPool(messages, process.pid)
