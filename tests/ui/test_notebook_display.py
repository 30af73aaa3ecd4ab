"""The display of a run in a notebook: one output that is updated, of escaped HTML."""

from __future__ import annotations

import sys
import types

import pytest

from aitrain import redaction
from aitrain.events import Ended, Evaluated, Event, Note, Phase, Step
from aitrain.ui.notebook_display import NotebookDisplay


class Page:
    """IPython's display: the outputs of a cell, by the order in which they were made."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, str]] = []
        self.updates = 0

    def display(self, bundle: dict[str, str], raw: bool, display_id: bool) -> Page:
        assert (raw, display_id) == (True, True)
        self.outputs.append(bundle)
        return self

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        self.updates += 1
        self.outputs[-1] = bundle

    @property
    def html(self) -> str:
        (output,) = self.outputs
        return output["text/html"]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    made, module = Page(), types.ModuleType("IPython.display")
    vars(module)["display"] = made.display
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return made


def step(number: int, reward: float | None = 0.5) -> Step:
    return Step(number, 10, reward, 90.0, 0.25, 0.0, 0.0, 100.0, {"step": 1.0})


def shown(page: Page, *events: Event) -> str:
    with NotebookDisplay() as display:
        for event in events:
            display(event)
    return page.html


def test_one_output_shows_progress_scores_curve_and_notes(page: Page) -> None:
    events = [Note("7 checks passed"), Evaluated("before", 0.2, 0.1), step(1, 0.1), step(5, 0.6), Phase("saving")]
    html = shown(page, *events)

    assert page.updates > 0
    for text in ("7 checks passed", "5/10", "0.600", "0.200 before", "25% flat", "saving", "width:50.0%"):
        assert text in html
    assert html.count("<circle") == 1
    assert "5/10" in page.outputs[0]["text/plain"]


def test_texts_of_others_are_text_and_secrets_are_not_shown(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sesame-open-9431"
    monkeypatch.setenv("MY_API_KEY", secret)
    monkeypatch.setattr(redaction._known, "until", 0.0)
    html = shown(page, Note(f"<script>alert(1)</script> \x1b[2J {secret}"), Phase("<b>at</b>"))

    assert "<script>" not in html
    assert "<b>" not in html
    assert "\x1b" not in html
    assert secret not in html
    assert "&lt;script&gt;" in html


def test_the_last_state_says_how_the_run_ended_and_updates_are_few_when_steps_are_fast(page: Page) -> None:
    assert "finished" in shown(page, *map(step, range(1, 11)), Ended("finished", 10))
    assert page.updates <= 3
