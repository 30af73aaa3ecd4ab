"""Addresses of vLLM servers, whether one is of this machine, where the servers of a run listen, and their key."""

from __future__ import annotations

import os
import secrets
import socket
from urllib.parse import urlsplit

from aitrain.errors import ConfigError

LOOPBACK = "127.0.0.1"
ANY = "0.0.0.0"
KEY_VARIABLE = "VLLM_API_KEY"
"""vLLM's environment variable for the key that requests need."""


def new_key() -> str:
    """The key for servers that are started: that of the environment, else a random one."""
    return os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(32)


def key_header(key: str | None = None) -> dict[str, str]:
    """The header with a key for vLLM servers, by default that of the environment; empty if there is none."""
    key = key or os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def is_here(url: str) -> bool:
    """Whether the host of an address is this machine; False if its name is unknown."""
    return any(_can_bind(address) for address in _addresses_of(urlsplit(url).hostname or ""))


def check_listen_address(host: str) -> None:
    """Check that servers can listen there.

    Raises:
        ConfigError: it is no address of this machine that others can reach.
    """
    own = [address for address in _addresses_of(host) if _can_bind(address)]
    if not own or host in (ANY, "::"):
        raise ConfigError(
            f"vllm_listen_address: {host} is not an address of this machine that others can reach\n"
            "Give the name or the address that they use: hostname -I lists them."
        )


def bound_address(host: str) -> str:
    """The address to bind for servers that others reach at `host`: its own, or all addresses of this machine where the
    name resolves to loopback, as hostnames do on Debian."""
    addresses = _addresses_of(host)
    own = [address for address in addresses if address == host or not address.startswith(("127.", "::1"))]
    return next(filter(_can_bind, own), ANY)


def _addresses_of(host: str) -> list[str]:
    """The addresses that a name resolves to; none if it is unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(address[0]) for *_, address in found]


def _can_bind(address: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as attempt:
            attempt.bind((address, 0))
    except OSError:
        return False
    return True
