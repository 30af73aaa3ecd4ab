"""A line that says what a command does before it has anything to show: on a terminal only, and erased afterwards.

It imports the standard library only, because it stands there while all else is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading(text: str, quiet: bool = False) -> Iterator[None]:
    """Show the text on standard error during the block, unless the command is quiet."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb" or is_ci():
        yield
        return
    sys.stderr.write(f"{text} ...")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def is_ci() -> bool:
    """Whether this runs in CI, where a terminal is a log that cannot be drawn over."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
