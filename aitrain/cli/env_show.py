"""`aitrain env show`: sample cases as the model sees them."""

from __future__ import annotations

from typing import Annotated

import typer

from aitrain.cli.env_arguments import EnvConfig, EnvKeywords, EnvName, env_options


def env_show(
    env: EnvName,
    *,
    cases: Annotated[int, typer.Option(min=0, help="How many cases, spread over the dataset.")] = 3,
    case: Annotated[str | None, typer.Option(help="One case: the number of its row, or its case_idx.")] = None,
    rl_env_config: EnvConfig = None,
    keywords: EnvKeywords = None,
    tokenizer: Annotated[str, typer.Option(help="Model whose chat template and tokens are shown.")] = "tiny",
    as_json: Annotated[bool, typer.Option("--json", help="Print the cases as JSON.")] = False,
) -> int:
    """Show sample cases as the model sees them: rendered, with token counts, columns, tools and reference."""
    from aitrain.cli.env_process import check_environment, run_on_terminal  # here, because help needs none of it

    options = env_options(env, rl_env_config, keywords) | {"model": tokenizer}
    check_environment(options)
    show = {"case": case, "count": cases, "as_json": as_json}
    return run_on_terminal("aitrain.jobs.env_terminal", {"command": "show", "options": options, "show": show})
