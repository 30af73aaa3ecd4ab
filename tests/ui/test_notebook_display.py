"""The display of a run in a notebook: one output that is updated, of escaped HTML."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from aitrain import redaction
from aitrain.events import Evaluated, Note, Phase, Step
from aitrain.notebook import NotebookDisplay


def test_one_output_shows_progress_and_scores_and_texts_of_others_as_text_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states: list[str] = []
    handle = SimpleNamespace(update=lambda shown: states.append(shown._repr_mimebundle_((), ())["text/html"]))
    module = SimpleNamespace(display=lambda shown, display_id: handle)
    monkeypatch.setitem(sys.modules, "IPython.display", module)  # type: ignore[arg-type]
    monkeypatch.setenv("MY_API_KEY", "sesame-open-9431")
    redaction.known_forms.cache_clear()
    with NotebookDisplay() as display:
        display.start()
        display(Evaluated("before", 0.2, 0.1))
        display(Note("<script>alert(1)</script> \x1b[2J sesame-open-9431"))
        for number in range(1, 41):
            display(Step(number, 80, number / 80, 90.0, 0.25, 0.0, 0.0, 100.0, {"step": 1.0}))
        display(Phase("<b>at</b>"))

    assert len(states) < 5, "updates are few when steps are fast"
    for text in ("40/80", "0.500", "0.200 before", "25% flat", "▁", "&lt;script&gt;"):
        assert text in states[-1]
    for text in ("<script>", "<b>at", "\x1b", "sesame-open-9431"):
        assert text not in states[-1]
