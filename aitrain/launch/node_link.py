"""The connections between the commands of a run on several machines: JSON lines over TCP, authenticated by a token.

Both sides prove that they know the token, by an HMAC over random numbers of both, before anything else is read. Lines
are neither encrypted nor pickled. While a run lasts, each side sends a heartbeat; a side that is silent is lost.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from aitrain.errors import AitrainError

BEAT = 2.0
"""Seconds between two heartbeats."""
SILENCE = 30.0
"""Maximum seconds without a heartbeat."""
PROOF_SECONDS = 10.0
"""Seconds for a new connection to prove that it knows the token."""
SHORT, LONG = 4096, 4 << 20
"""Maximum bytes of a line, before and after the proof."""

Message: TypeAlias = dict[str, Any]
"""JSON; its `kind` says what it is."""


class LinkError(AitrainError):
    """A connection is lost, or what came over it is not a message."""


class WrongTokenError(LinkError):
    """The other side does not know the token."""


class Peer:
    """The connection to the command on another machine."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._file, self._lock = connection, connection.makefile("rb"), threading.Lock()
        self.node, self.host, self.gpus = 0, "", 0
        self.address = ""
        """Address of the other machine."""
        with suppress(OSError):  # it is gone already
            self.address = connection.getpeername()[0]
        self.own_address: str = connection.getsockname()[0]
        """Address of this machine, by which the other one reaches it."""
        self.has_ended = False
        """Whether it said that it ends, after which a lost connection is no failure; or is lost."""

    @property
    def name(self) -> str:
        """`node 1 (nodeB, 10.77.0.2)`."""
        return f"node {self.node} ({', '.join(filter(None, [self.host, self.address]))})"

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            LinkError: the connection is lost.
        """
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise LinkError(f"{self.name} is gone") from error

    def receive(self, seconds: float, most: int = LONG) -> Message:
        """Wait for a message.

        Raises:
            LinkError: the connection is lost, or there was no message within these seconds.
        """
        try:
            self._socket.settimeout(seconds)
            line = self._file.readline(most)
            message = json.loads(line) if line.endswith(b"\n") else None
        except TimeoutError as error:
            raise LinkError(f"{self.name} was silent for {seconds:.0f} seconds") from error
        except (OSError, ValueError, RecursionError) as error:  # ValueError: also of a file that is closed
            raise LinkError(f"{self.name} is gone") from error
        if not isinstance(message, dict):
            raise LinkError(f"{self.name} is gone")
        return message

    def is_gone(self) -> bool:
        """Whether the other side has closed the connection, while no message is expected."""
        try:
            is_readable = bool(select.select([self._socket], [], [], 0)[0])
            return is_readable and self._socket.recv(1, socket.MSG_PEEK) == b""
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        """Close the connection; a thread that waits for a message gets a LinkError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._socket.close()


def prove_to_node_0(peer: Peer, token: str) -> None:
    """The proof on the side that connected.

    Raises:
        WrongTokenError: the tokens differ.
        LinkError: the connection is lost, or no command of ours answers.
    """
    challenge, own = str(peer.receive(PROOF_SECONDS, SHORT).get("challenge")), secrets.token_hex(32)
    peer.send({"proof": _proof(token, "node", challenge, own), "challenge": own})
    answer = peer.receive(PROOF_SECONDS, SHORT)
    if not hmac.compare_digest(str(answer.get("proof")), _proof(token, "node 0", challenge, own)):
        raise WrongTokenError(peer.name)


def demand_proof(peer: Peer, token: str) -> None:
    """The proof on node 0's side.

    Raises:
        WrongTokenError: the tokens differ.
        LinkError: the connection is lost, or is not of a command of ours.
    """
    own = secrets.token_hex(32)
    peer.send({"challenge": own})
    answer = peer.receive(PROOF_SECONDS, SHORT)
    theirs = str(answer.get("challenge"))
    if not hmac.compare_digest(str(answer.get("proof")), _proof(token, "node", own, theirs)):
        peer.send({"proof": ""})
        raise WrongTokenError(peer.name)
    peer.send({"proof": _proof(token, "node 0", own, theirs)})


def _proof(token: str, side: str, *challenges: str) -> str:
    """Of one side, so that what one side proves is of no use as the other's proof."""
    return hmac.digest(token.encode(), "\n".join([side, *challenges]).encode(), "sha256").hex()


@dataclass
class NodeLink:
    """The connections of one machine: node 0's to all others, another one's to node 0."""

    peers: Sequence[Peer]
    silence: float = SILENCE
    on_message: Callable[[Peer, Message], None] = lambda peer, message: None
    """Called for each message, in the thread of its peer."""
    on_lost: Callable[[str], None] = lambda why: None
    """Called when a connection is lost, in the thread of its peer."""
    beat: Callable[[], Message] = dict
    """What a heartbeat says."""
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def own_address(self) -> str:
        """Address by which the other machines reach this one."""
        return self.peers[0].own_address

    def start(self) -> None:
        """Read messages and send heartbeats, in threads."""
        for peer in self.peers:
            threading.Thread(target=self._read, args=[peer], name=f"node-{peer.node}", daemon=True).start()
        threading.Thread(target=self._keep_beating, name="node-heartbeat", daemon=True).start()

    def tell(self, kind: str, only: Peer | None = None, **fields: object) -> None:
        """Send a message to all others, or to one; a lost connection is reported by its thread."""
        for peer in self.peers if only is None else [only]:
            with suppress(LinkError):
                peer.send({"kind": kind, **fields})

    def send_beat(self) -> None:
        """Send a heartbeat."""
        self.tell("beat", **self.beat())

    def wait_for_byes(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait until all others have said that they end, or `is_over`."""
        deadline = time.monotonic() + seconds
        while not is_over() and time.monotonic() < deadline and not all(peer.has_ended for peer in self.peers):
            time.sleep(0.05)

    def close(self) -> None:
        """Close all connections."""
        self._over.set()
        for peer in self.peers:
            peer.close()

    def _keep_beating(self) -> None:
        while not self._over.wait(min(BEAT, self.silence / 4)):
            self.send_beat()

    def _read(self, peer: Peer) -> None:
        while True:
            try:
                message = peer.receive(self.silence)
            except LinkError as why:
                if not self._over.is_set() and not peer.has_ended:
                    self.on_lost(str(why))
                peer.has_ended = True
                return
            if message.get("kind") == "bye":
                peer.has_ended = True
            try:
                self.on_message(peer, message)
            except Exception as error:  # without this thread nothing would be heard of the machine
                self.on_lost(f"{peer.name} sent a message that cannot be handled: {error!r}")
                raise
