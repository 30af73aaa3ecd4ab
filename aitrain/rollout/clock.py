"""The clock of a rollout: seconds in which episodes wait for the policy and for their environments."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PARTS = ("rollout", "generate", "environment")


class RolloutClock:
    """Seconds in which each part ran at least once.

    With a server, some episodes wait for the server while others wait for their environments, so that the sum of the
    parts may exceed the elapsed time.
    """

    def __init__(self) -> None:
        self._total = dict.fromkeys(PARTS, 0.0)
        self._running: Counter[str] = Counter()
        self._since = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def running(self, part: str) -> Iterator[None]:
        """Run the clock of a part in this context."""
        if not self._running[part]:
            self._since[part] = time.monotonic()
        self._running[part] += 1
        try:
            yield
        finally:
            self._running[part] -= 1
            if not self._running[part]:
                self._total[part] += time.monotonic() - self._since[part]

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds that another clock has measured."""
        for part, value in seconds.items():
            self._total[part] += value

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last call."""
        taken, self._total = self._total, dict.fromkeys(PARTS, 0.0)
        return taken
