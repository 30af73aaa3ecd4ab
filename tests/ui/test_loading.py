"""The line that stands on a terminal while a command loads."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from aitrain.ui.loading import loading
from tests.workbench.terminal import start


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("variables", "is_shown"), [({}, True), ({"CI": "true"}, False), ({"TERM": "dumb"}, False)])
def test_the_line_is_erased_when_the_block_ends_and_not_written_where_it_could_not_be(
    variables: dict[str, str], is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TerminalText()
    monkeypatch.setattr("aitrain.ui.loading.sys", SimpleNamespace(stderr=text))  # pytest sets sys.stderr itself
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="no"), loading("checking"):
        raise ValueError("no")
    with loading("reading", quiet=True):
        pass
    assert text.getvalue() == ("checking ...\r\x1b[K" if is_shown else "")


@pytest.mark.slow
def test_a_command_says_what_it_does_before_it_has_anything_to_show(tmp_path: Path) -> None:
    terminal = start(tmp_path, ["env", "check", "aitrain.envs.nothing"])
    assert terminal.end() != 0
    places = [terminal.raw.index(f"{word} ...") for word in ("loading aitrain", "reading the environment")]
    assert places[0] == 0
    assert places == sorted(places)
    assert terminal.raw.rpartition("\x1b[K")[2].startswith("aitrain: ")
