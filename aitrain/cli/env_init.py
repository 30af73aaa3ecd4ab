"""`aitrain env init`: a new environment with its test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aitrain.errors import ConfigError


def env_init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the environment, such as my_task.")],
    *,
    multi_turn: Annotated[bool, typer.Option("--multi-turn", help="Episodes of several turns.")] = False,
    tools: Annotated[bool, typer.Option("--tools", help="A tool that the model may call.")] = False,
    service: Annotated[bool, typer.Option("--service", help="A score that asks a slow service.")] = False,
    judges: Annotated[bool, typer.Option("--judges", help="Rows that judges score.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> int:
    """Write a new environment with its test: one readable file to edit.

    Writes NAME.py and test_NAME.py into the working directory. The environment is complete: it passes `aitrain env
    check`, and the tiny model learns it. Change its questions and its score into your own.
    """
    from aitrain.workbench.init import write_environment  # here, because help needs none of it

    shapes = {"multi_turn": multi_turn, "tools": tools, "service": service, "judges": judges}
    chosen = [kind for kind, is_chosen in shapes.items() if is_chosen] or ["plain"]
    kind = "tools_with_state" if chosen == ["multi_turn", "tools"] else chosen[0]
    if len(chosen) > 1 and kind != "tools_with_state":
        raise ConfigError("--service, --judges: give one alone, and copy its methods into another environment")
    file, test = write_environment(name, kind, Path.cwd())
    if as_json:
        typer.echo(json.dumps({"file": file.name, "test": test.name}))
        return 0
    typer.echo(NEXT.format(name=name, file=file.name, test=test.name))
    return 0


NEXT = """\
Wrote {file} and its test, {test}. Edit, check, train:

  aitrain env check {file}

  aitrain grpo --model tiny --rl-env {file} --project-name {name} \\
      --rl-prompts-per-step 16 --rl-num-generations 8 --batch-size 64 \\
      --rl-max-new-tokens 8 --rl-kl-coef 0 --lr 4e-4 --max-steps 20"""
