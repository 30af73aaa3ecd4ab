"""Notices when an environment reaches outside of its process: network connections and local services."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo")
"""Audit events of Python's socket module: which address, before anything is sent."""


def watch_connections(on_use: Callable[[str], object]) -> None:
    """Call `on_use` with the address before each connection, name look-up or datagram of this process, from now on
    until it ends: an audit hook cannot be removed."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS:
            on_use(_shown(event, arguments))

    sys.addaudithook(hook)


def _shown(event: str, arguments: tuple[object, ...]) -> str:
    address = arguments[:2] if event == "socket.getaddrinfo" else arguments[1]
    if isinstance(address, tuple):
        return ":".join(str(part) for part in address[:2] if part is not None)
    return str(address)


def open_connections() -> list[str]:
    """Addresses that Python's sockets of this process are connected to over the network; those of libraries in C, such
    as torch's between ranks, are not seen."""
    # by type: isinstance asks the object, and lazy ones import what they stand for
    sockets = (one for one in gc.get_objects() if issubclass(type(one), socket.socket))
    return [address for one in sockets if (address := _peer(one))]


def cut_connections() -> None:
    """In a forked process: make all inherited network connections unusable, as they belong to the parent."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in [int(name) for name in os.listdir("/dev/fd") if name.isdecimal()]:
        with suppress(OSError):  # not a socket
            with socket.socket(fileno=os.dup(fd)) as one:
                is_connected = bool(_peer(one))
            if is_connected:
                os.dup2(nothing, fd)
    os.close(nothing)


def _peer(one: socket.socket) -> str:
    """The address at the other end of a network connection; empty if there is none."""
    if one.fileno() < 0 or one.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    try:
        return ":".join(map(str, one.getpeername()[:2]))
    except OSError:
        return ""
