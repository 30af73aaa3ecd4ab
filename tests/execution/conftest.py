"""What tests of calls share: the clock of their deadlines, and an end of what hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.execution.waiting import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all deadlines. What watches them looks at it whenever the timeout has passed for real."""
    clock = Clock()
    monkeypatch.setattr("aitrain.execution.task.time", clock)
    return clock


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """What hangs ends when this is set, at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()
