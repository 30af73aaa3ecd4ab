"""Waiting for what happens in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(is_so: Callable[[], object], seconds: float = 20.0) -> bool:
    """Whether it comes true within these seconds."""
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True
