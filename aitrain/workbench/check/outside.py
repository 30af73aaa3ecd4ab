"""Notices when an environment reaches outside of its process: connections, pipes to other programs, databases."""

from __future__ import annotations

import gc
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from aitrain.environment.endpoint import running_address

EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo")
"""Audit events of Python's socket module: which address, before anything is sent."""


def watch_connections(on_use: Callable[[str], object]) -> None:
    """Call `on_use` with the address before each connection, name look-up or datagram of this process, from now on
    until it ends: an audit hook cannot be removed. Connections to the run's own endpoint do not count."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS and (address := _address(event, arguments)) != running_address():
            on_use(_shown(address))

    sys.addaudithook(hook)


def _address(event: str, arguments: tuple[object, ...]) -> object:
    return tuple(arguments[:2]) if event == "socket.getaddrinfo" else arguments[1]


def _shown(address: object) -> str:
    if isinstance(address, tuple):
        return ":".join(str(part) for part in address[:2] if part is not None)
    return str(address)


def open_database() -> str:
    """The file of an open SQLite database, which a forked process must not touch; empty if there is none."""
    sqlite3 = sys.modules.get("sqlite3")
    if sqlite3 is None:
        return ""
    # by type: isinstance asks the object, and lazy ones import what they stand for
    for one in [found for found in gc.get_objects() if issubclass(type(found), sqlite3.Connection)]:
        with suppress(sqlite3.Error):  # closed, or of another thread
            if name := one.execute("PRAGMA database_list").fetchone()[2]:
                return str(name)
    return ""


@dataclass(frozen=True)
class Cut:
    """A connection or pipe of the parent, which this process holds no longer: what is written to it stays here."""

    name: str
    other_end: socket.socket

    @property
    def was_used(self) -> bool:
        """Whether something was written to it."""
        try:
            return bool(self.other_end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False


def cut_connections(keep: int) -> list[Cut]:
    """In a forked process: replace all inherited sockets and pipes but `keep`, as they belong to the parent. Whoever
    waits for an answer from one waits for ever."""
    found = list[Cut]()
    for fd in [int(name) for name in os.listdir("/dev/fd") if name.isdecimal()]:
        if fd <= 2 or fd == keep:
            continue
        with suppress(OSError):  # closed meanwhile
            if (name := _name_of(fd)) is not None:
                own, other = socket.socketpair()
                os.dup2(own.fileno(), fd, inheritable=False)
                own.close()
                found.append(Cut(name, other))
    return found


def used(cuts: list[Cut]) -> Iterator[str]:
    """Names of the connections and pipes that something was written to."""
    return (cut.name for cut in cuts if cut.was_used)


def _name_of(fd: int) -> str | None:
    """What a socket or pipe is connected to; None for a file."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode):
        return "another program"
    if not stat.S_ISSOCK(mode):
        return None
    with socket.socket(fileno=os.dup(fd)) as one:
        try:
            peer = one.getpeername()
        except OSError:
            return "a socket"
    if isinstance(peer, tuple):
        return ":".join(map(str, peer[:2]))
    return (peer if isinstance(peer, str) else os.fsdecode(peer)) or "another program"
