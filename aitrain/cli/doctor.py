"""`aitrain doctor`: checks whether this machine can train, and prints one line per check."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, print_json
from aitrain.runs.run_folder import RUNS

COLOURS = {"ok": typer.colors.GREEN, "note": typer.colors.YELLOW, "problem": typer.colors.RED}


def doctor(
    output_dir: Annotated[Path, typer.Option(help="Folder that run folders are to be made in.")] = Path(RUNS),
    as_json: AsJson = False,
) -> int:
    """Check whether this machine can train: libraries, GPUs, disk."""
    from aitrain.launch.doctor import examine  # here, because no other command needs what it imports

    findings = examine(output_dir)
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    for finding in findings if not as_json else ():
        state = typer.style(f"{finding.state:8}", COLOURS[finding.state])
        typer.echo(f"{state} {finding.name:14} {finding.found}", color=False if os.environ.get("NO_COLOR") else None)
        for advice in finding.advice.splitlines():
            typer.echo(f"{'':24}-> {advice}")
    return 1 if any(finding.state == "problem" for finding in findings) else 0
