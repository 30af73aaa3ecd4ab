"""`aitrain env list`: the environments that can be named with --rl-env."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from aitrain.workbench.listing import ListedEnvironment

HEADINGS = {
    "bundled": "Bundled",
    "installed": "Of installed packages (entry points in aitrain.environments)",
    "adapter": "Of other frameworks, by an adapter: --rl-env NAME:ID",
}


def env_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of lines.")] = False,
) -> int:
    """List the environments that can be named with --rl-env.

    Nothing is imported: packages are found by their metadata.
    """
    from aitrain.ui.escape_controls import escape_controls  # here, because help needs none of it
    from aitrain.workbench.listing import listed_environments

    found = listed_environments()
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
        return 0
    for line in _lines(found, min(100, shutil.get_terminal_size().columns)):
        typer.echo(escape_controls(line))
    return 0


def _lines(found: Iterable[ListedEnvironment], width: int) -> Iterator[str]:
    by_source: dict[str, list[ListedEnvironment]] = {}
    for one in found:
        by_source.setdefault(one.source, []).append(one)
    for source, heading in HEADINGS.items():
        yield heading
        for one in by_source.get(source, []):
            yield f"  {one.rl_env}{_package(one)}"
            yield from textwrap.wrap(one.summary, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        if source not in by_source:
            yield "  none"
        yield ""
    yield "Your own: --rl-env path/to/file.py:Class. Write one with: aitrain env init my_task"


def _package(one: ListedEnvironment) -> str:
    if one.package is None:
        return ""
    if one.version is None:
        return f"  ({one.package} is not installed)"
    return f"  ({one.package} {one.version}{', which the adapter does not support' if one.problem else ''})"
