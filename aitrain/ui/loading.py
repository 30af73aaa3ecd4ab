"""Whether a terminal is one that can be drawn over."""

from __future__ import annotations

import os


def is_ci() -> bool:
    """Whether this runs in CI, where a terminal is a log that cannot be drawn over."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
