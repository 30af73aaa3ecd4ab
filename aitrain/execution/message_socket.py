"""Messages between processes over a socket, with file descriptors."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence


class MessageSocket:
    """One end of a connection that carries whole messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        """The socket's file descriptor."""
        return self._socket.fileno()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> bool:
        """Send a message; False if the other end is gone."""
        try:
            socket.send_fds(self._socket, [struct.pack("!Q", len(message))], fds)
            self._socket.sendall(message)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[bytes | None, list[int]]:
        """Wait for the next message and its file descriptors; None if the other end is gone."""
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, 8, 8)
            head += self._read(8 - len(head)) if head else b""
            return self._read(struct.unpack("!Q", head)[0]), fds
        except (OSError, EOFError, struct.error):
            return None, []

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def is_open(self) -> bool:
        """Whether the other end is open; valid only while no message is expected from it."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
