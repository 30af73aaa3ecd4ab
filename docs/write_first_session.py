"""Writes first-session.md: what a terminal shows of `.ci/newcomer --all`, which installs aitrain in a clone.

A terminal emulator keeps what stays on the screen, as a person would see it.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pyte

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "newcomer"
PAGE = ROOT / "docs" / "first-session.md"
WIDTH, HEIGHT, LINES = 110, 40, 20_000
BEGINNING = """\
# A first session

From a checkout to a model that learned a task of your own: every command, and what the terminal shows. The
[tutorial](tutorial.md) explains the same steps. `.ci/newcomer --all` does it again. Only pip's warnings about
the machine's package index are left out. The last line counts from `aitrain env init` on.
"""


def commands() -> list[str]:
    """The commands that the script runs, one for each `run`, in their order."""
    found = re.findall(r"""^ *run (?:'([^']*)'|"([^"]*)")$""", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
    return [single or double for single, double in found]


def seen() -> list[str]:
    """The lines that stay on the terminal. pip does not warn, as its warnings are about the machine's package index."""
    screen = pyte.HistoryScreen(WIDTH, HEIGHT, history=LINES)
    stream = pyte.ByteStream(screen)
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    variables = {**os.environ, "TERM": "xterm-256color", "PYTHON": "python3.11", "PIP_QUIET": "1"}
    with subprocess.Popen([SCRIPT, "--all"], stdin=end, stdout=end, stderr=end, env=variables) as script:
        os.close(end)
        while data := _read(terminal):
            stream.feed(data)
    assert script.returncode == 0, "\n".join(screen.display)
    above = ["".join(line[column].data for column in range(WIDTH)) for line in screen.history.top]
    return [line.rstrip() for line in [*above, *screen.display]]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # the command has ended, and its terminal with it
        return b""


def page(lines: list[str]) -> str:
    """The page: what the terminal showed, in a block for each part."""
    parts = re.split(r"^## (.*)$", "\n".join(lines), flags=re.MULTILINE)[1:]
    blocks = [f"## {title}\n\n```\n{text.strip()}\n```\n" for title, text in zip(parts[::2], parts[1::2], strict=True)]
    return "\n".join([BEGINNING, *blocks])


if __name__ == "__main__":
    PAGE.write_text(page(seen()), encoding="utf-8")
