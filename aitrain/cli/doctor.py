"""`aitrain doctor`: checks whether this machine can train, and prints one line per check."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aitrain.cli.flags import AsJson, print_json
from aitrain.runs.run_folder import RUNS

if TYPE_CHECKING:
    from aitrain.launch.doctor import Finding

COLOURS = {"ok": typer.colors.GREEN, "note": typer.colors.YELLOW, "problem": typer.colors.RED}
INDENT = 24


def doctor(
    output_dir: Annotated[Path, typer.Option(help="Folder that run folders are to be made in.")] = Path(RUNS),
    as_json: AsJson = False,
) -> int:
    """Check whether this machine can train: libraries, GPUs, disk."""
    from aitrain.launch.doctor import examine  # here, because no other command needs what it imports

    findings = examine(output_dir)
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        for line in _lines(findings, min(100, shutil.get_terminal_size().columns)):
            typer.echo(line, color=False if os.environ.get("NO_COLOR") else None)
    return 1 if any(finding.state == "problem" for finding in findings) else 0


def _lines(findings: Iterable[Finding], width: int) -> Iterator[str]:
    """`ok       torch          2.13.0`, with the advice below it."""
    for finding in findings:
        state = typer.style(f"{finding.state:8}", COLOURS[finding.state])
        first, *more = _wrapped(finding.found, width)
        yield f"{state} {finding.name:14} {first}"
        yield from (f"{'':{INDENT}}{line}" for line in more)
        for advice in finding.advice.splitlines():
            why, colon, command = advice.rpartition(": ")
            lines = _wrapped(advice, width - 3)
            if command.startswith("pip ") and len(advice) > width - 3 - INDENT:  # a command stays in one piece
                lines = [*_wrapped(why + colon.strip(), width - 3), command]
            for index, line in enumerate(lines):
                yield f"{'':{INDENT}}{'   ' if index else '-> '}{line}"


def _wrapped(text: str, width: int) -> list[str]:
    """The text wrapped at spaces only, so that paths and requirements can be copied."""
    return textwrap.wrap(text, max(30, width - INDENT), break_long_words=False, break_on_hyphens=False) or [""]
