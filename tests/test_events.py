"""What a run says while it runs: one line each, there and back."""

from __future__ import annotations

import pytest

from aitrain.events import Event, Failed, Note, Step, decode, encode

EVENTS: list[Event] = [
    Note("two\nlines, ä"), Step(1, 2, None, 0.5), Step(1, 2, 0.5, 0.5, 0.1, 0.2, None, 9.5, {"step": 1.5}),
    Failed("no such file", 2),
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_arrives_as_it_was_sent(event: Event) -> None:
    line = encode(event)
    assert line.count("\n") == 1
    assert decode(line) == event


@pytest.mark.parametrize("line", ["", "Downloading 10%", "[1, 2]", "null", '{"event": "Other"}', '{"event": "Step"}'])
def test_what_a_library_prints_between_is_no_event(line: str) -> None:
    assert decode(line) is None
