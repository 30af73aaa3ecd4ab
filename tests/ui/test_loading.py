"""The line that stands on a terminal while a command loads."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from aitrain.ui.loading import loading


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
