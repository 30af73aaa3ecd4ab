"""docs/env-check.md: its outputs are those of the command, and it names all checks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aitrain.workbench.check.registry import CHECKS

PAGE = Path(__file__).parents[3] / "docs" / "env-check.md"
CONSOLE = re.compile(r"^```console\n\$ (.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILES = re.compile(r"^```python file=(\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def steady(text: str) -> str:
    """The output without what differs from run to run: times, folders, shuffled rows."""
    text = re.sub(r"\d+\.\d+s", "0.1s", text)
    text = re.sub(r"\d+ of 24 differ", "23 of 24 differ", text)
    return re.sub(r"at \S*/(\w+\.py)", r"at \1", text)


def words(text: str) -> list[str]:
    """The words of an output: its lines are broken elsewhere if a folder has a longer name."""
    return steady(text).split()


def output_of(command: str, folder: Path) -> str:
    """What a command of the page prints, in a terminal of 100 columns."""
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONHASHSEED": "0"}
    line = [sys.executable, "-m", *command.split()]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files."""
    path = tmp_path_factory.mktemp("page")
    for name, text in FILES.findall(PAGE.read_text(encoding="utf-8")):
        (path / name).write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("command", "output"), CONSOLE.findall(PAGE.read_text(encoding="utf-8")), ids=lambda v: v[:50])
@pytest.mark.slow
def test_an_output_of_the_page_is_what_the_command_prints(command: str, output: str, folder: Path) -> None:
    assert words(output_of(command, folder)) == words(output)


def test_the_page_names_every_check() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [check.name for check in CHECKS if f"| `{check.name}` |" not in text] == []
