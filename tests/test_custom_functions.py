"""Functions that options name: module:function and file.py:function."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aitrain.environment.user_modules import load_function
from aitrain.errors import ConfigError, EnvironmentFailed
from tests import test_loader

imports_of_its_own = test_loader.imports_of_its_own  # each test works in an empty folder


@pytest.mark.parametrize(
    ("place", "word"),
    [
        ("gone.py:f", "no file gone.py"),
        ("own.py:smaple", "Did you mean sample"),
    ],
)
def test_a_misspelt_place_is_refused(here: Path, place: str, word: str) -> None:
    (here / "own.py").write_text("def sample(): ...\n")
    with pytest.raises(ConfigError, match=f"^custom_loss: (?s:.*){word}"):
        load_function("custom_loss", place)


def test_a_file_is_imported_once_and_again_when_it_has_changed(here: Path) -> None:
    (here / "own.py").write_text("def f(): return 1\ndef g(): return f\n")
    first = load_function("custom_loss", "own.py:f")
    assert load_function("custom_loss", "own.py:g")() is first
    (here / "own.py").write_text("def f(): return 2\n")  # as between two runs in a notebook
    os.utime(here / "own.py", (1, 1))
    assert load_function("custom_loss", "own.py:f")() == 2


def test_what_cannot_be_imported_or_called_is_refused(here: Path) -> None:
    (here / "broken.py").write_text("x = 1\ny = 1 / 0\ndef f(): ...\n")
    with pytest.raises(EnvironmentFailed, match=r"broken.py, line 2"):
        load_function("custom_loss", "broken.py:f")
    (here / "own.py").write_text("f = 3\n")
    with pytest.raises(ConfigError, match="not a function"):
        load_function("custom_loss", "own.py:f")
