"""Whether judges behind an address are asked; `aitrain env check` asks them with --ask-judges only: they may cost."""

from __future__ import annotations

import os

VARIABLE, OFFLINE = "AITRAIN_JUDGES", "offline"
"""Environment variable, and its value with which no judge sends a request: each leaves all answers out."""

not_asked: set[str] = set()
"""Addresses of the judges of this process that send no requests."""


def go_offline() -> None:
    """Send no requests in this process and those that it starts."""
    os.environ[VARIABLE] = OFFLINE


def is_offline() -> bool:
    """Whether judges send no requests."""
    return os.environ.get(VARIABLE) == OFFLINE
