"""The line that stands on a terminal while a command loads."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aitrain.ui.loading import loading
from tests.workbench.terminal import start


class TerminalText(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> TerminalText:
    text = TerminalText()
    monkeypatch.setattr("aitrain.ui.loading.sys", SimpleNamespace(stderr=text))  # pytest sets sys.stderr itself
    monkeypatch.setenv("TERM", "xterm")
    return text


def test_the_line_is_erased_when_the_block_ends_or_fails(shown: TerminalText) -> None:
    with loading("reading"):
        assert shown.getvalue() == "reading ..."
    with pytest.raises(ValueError, match="no"), loading("checking"):
        raise ValueError("no")
    assert shown.getvalue() == "reading ...\r\x1b[Kchecking ...\r\x1b[K"


@pytest.mark.parametrize("variables", [{"CI": "true"}, {"TERM": "dumb"}])
def test_nothing_is_written_where_it_could_not_be_erased(
    variables: dict[str, str], shown: TerminalText, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with loading("reading"):
        pass
    assert shown.getvalue() == ""


def test_a_quiet_command_writes_nothing(shown: TerminalText) -> None:
    with loading("reading", quiet=True):
        pass
    assert shown.getvalue() == ""


def test_the_line_needs_no_library() -> None:
    code = "import sys, aitrain.ui.loading; print({'rich', 'pydantic', 'typer'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["grpo", "--rl-env", "aitrain.envs.nothing"], ["loading aitrain", "checking the options"]),
        (["env", "check", "aitrain.envs.nothing"], ["loading aitrain", "reading the environment"]),
        (["eval", "no/such/model"], ["loading aitrain", "checking the options"]),
    ],
)
@pytest.mark.slow
def test_a_command_says_what_it_does_before_it_has_anything_to_show(
    command: list[str], words: list[str], tmp_path: Path
) -> None:
    terminal = start(tmp_path, command)
    assert terminal.end() != 0

    places = [terminal.raw.index(f"{word} ...") for word in words]
    assert places == sorted(places)
    assert places[0] == 0
    erased = terminal.raw.rpartition("\x1b[K")[2]
    assert erased.startswith("aitrain: ")
    assert "..." not in erased


def test_help_begins_with_its_own_words(tmp_path: Path) -> None:
    terminal = start(tmp_path, ["grpo", "--help"])
    assert terminal.end() == 0
    assert terminal.raw.startswith("Usage: aitrain grpo")
