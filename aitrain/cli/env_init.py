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
    judge: Annotated[bool, typer.Option("--judge", help="A score by a rule and by a judge.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the files as JSON.")] = False,
) -> int:
    """Write a new environment with its test: one readable file to edit.

    Writes NAME.py and test_NAME.py into the working directory. The environment is complete: it passes `aitrain env
    check`, and the tiny model learns it. Change its questions and its score into your own.
    """
    from aitrain.workbench.init import write_environment  # here, because help needs none of it

    if judge and (multi_turn or tools):
        raise ConfigError("--judge: give it alone, and copy the judge's methods into another environment")
    kind = "judge" if judge else "plain"
    if tools:
        kind = "tools_with_state" if multi_turn else "tools"
    elif multi_turn:
        kind = "multi_turn"
    new = write_environment(name, kind, Path.cwd())
    if as_json:
        typer.echo(json.dumps({"file": new.file.name, "test": new.test.name}))
        return 0
    typer.echo(NEXT.format(name=name, file=new.file.name, test=new.test.name))
    return 0


NEXT = """\
Wrote {file} and its test, {test}. Edit, check, train:

  aitrain env check {file}

  aitrain grpo --model tiny --rl-env {file} --project-name {name} \\
      --rl-prompts-per-step 16 --rl-num-generations 8 --batch-size 64 \\
      --rl-max-new-tokens 8 --rl-kl-coef 0 --lr 4e-4 --max-steps 20"""
