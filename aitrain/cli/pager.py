"""Shows long text in a pager."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress


def page(pieces: Iterable[str]) -> None:
    """Through the user's PAGER, else less; all at once where there is none, or nobody watches."""
    command = os.environ.get("PAGER", "less")
    words = shlex.split(command)
    if not sys.stdout.isatty() or not words or words == ["cat"] or shutil.which(words[0]) is None:
        for piece in pieces:
            sys.stdout.write(piece)
        return
    variables = {"LESS": "FRX", **os.environ}  # colours, and no waiting for a page that fits
    pager = subprocess.Popen(command, shell=True, stdin=subprocess.PIPE, env=variables, text=True, encoding="utf-8")
    assert pager.stdin is not None
    try:
        with suppress(BrokenPipeError, KeyboardInterrupt):  # the user has seen enough
            for piece in pieces:
                pager.stdin.write(piece)
    finally:
        _wait(pager)


def _wait(pager: subprocess.Popen[str]) -> None:
    """A Ctrl-C is the pager's, which uses it to stop a search."""
    while True:
        try:
            pager.communicate()
        except KeyboardInterrupt:
            continue
        return
