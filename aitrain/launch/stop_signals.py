"""SIGINT and SIGTERM of the command that runs a training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_stop_signals(handler: Callable[..., object]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM; no-op outside the main thread, which alone can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, kept in before.items():
            signal.signal(number, kept)
