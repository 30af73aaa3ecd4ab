"""Shows long text in a pager."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def page(pieces: Iterable[str]) -> None:
    """Show text with the user's PAGER, else less; print it if there is no pager or output is not a terminal."""
    command = os.environ.get("PAGER", "less")
    arguments = shlex.split(command)
    if not sys.stdout.isatty() or not arguments or arguments == ["cat"] or shutil.which(arguments[0]) is None:
        for piece in pieces:
            sys.stdout.write(piece)
        return
    variables = {"LESS": "FRX", **os.environ}  # with colours, and exit if the text fits on one screen
    pager = subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, env=variables, text=True, encoding="utf-8")
    assert pager.stdin is not None
    try:
        with suppress(BrokenPipeError, KeyboardInterrupt):  # the user has quit the pager
            for piece in pieces:
                pager.stdin.write(piece)
    finally:
        _wait(pager)


def _wait(pager: subprocess.Popen[str]) -> None:
    """Wait for the pager; Ctrl-C is for the pager, which stops a search with it."""
    while True:
        try:
            pager.communicate()
        except KeyboardInterrupt:
            continue
        return


def rendered(console: Console, shown: Iterable[RenderableType]) -> Iterator[str]:
    """Render part by part, so that the first page of a long text appears at once."""
    for part in shown:
        with console.capture() as captured:
            console.print(part, soft_wrap=not console.is_terminal)
        yield captured.get()
