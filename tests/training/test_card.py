"""The model card of real runs: what it says, and that nothing that somebody named becomes markup."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from aitrain import Result
from aitrain.ui import card as cards
from aitrain.ui.card import escaped
from tests.environments.vowels import Vowels
from tests.finished_runs import FinishedRuns

Train = Callable[..., Result]


def parts(result: Result) -> tuple[dict[str, Any], str]:
    """The front matter, and what follows."""
    _, front, body = (result.model / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_says_what_was_trained_on_what_and_what_came_of_it(finished: FinishedRuns) -> None:
    result = finished("plain")
    front, body = parts(result)
    assert front["library_name"] == "transformers"
    assert {"aitrain", "grpo"} <= set(front["tags"])
    assert "base_model" not in front  # a folder of this machine
    assert re.search(r"\| sampled \| \d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\] \| .* \| [+-]\d\.\d{3} \[[+-]\d", body)
    for fact in ("SHA-256", "finished_runs.py", "3 held out", "4 steps", "| seed | 42 |"):
        assert fact in body.replace("\\", "")


def test_text_is_escaped() -> None:
    assert escaped("a_b*c <b>&\n| y\x1b") == r"a\_b\*c &lt;b&gt;&amp; \| y\\x1b"


def test_a_card_that_cannot_be_written_costs_no_model(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(cards, "resolve", refuse)
    result = train(Vowels(), max_steps=1, eval_cases=0)
    assert (result.status, (result.model / "model.safetensors").exists()) == ("finished", True)
    assert "OSError: the disk is full" in capsys.readouterr().err
