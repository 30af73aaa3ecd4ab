"""`aitrain env play`: play an episode by hand, or with a scripted policy or a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aitrain.cli.env_arguments import EnvConfig, EnvKeywords, EnvName, env_options
from aitrain.errors import ConfigError, did_you_mean

POLICIES = ("person", "reference", "empty", "junk", "model", "script")
POLICY_HELP = (
    "Who answers: person (you), reference (the environment's), empty (nothing), junk (noise), model (with --model),"
    " or script FILE (one reply a line, or a JSON list)."
)


def env_play(
    env: EnvName,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The replies, for --policy script.")] = None,
    *,
    policy: Annotated[str, typer.Option(help=POLICY_HELP, autocompletion=lambda: list(POLICIES))] = "person",
    model: Annotated[str | None, typer.Option(help="Model that plays: a Hub name, a folder, or tiny.")] = None,
    case: Annotated[str, typer.Option(help="Case: the number of its row, or its case_idx.")] = "0",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episode.")] = 0,
    max_turns: Annotated[
        int | None, typer.Option("--rl-max-turns", "--max-turns", min=1, help="Maximum number of turns.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--rl-max-new-tokens", "--max-new-tokens", min=1, help="Maximum tokens of an answer of the model."
        ),
    ] = None,
    rl_env_config: EnvConfig = None,
    keywords: EnvKeywords = None,
    tokenizer: Annotated[str, typer.Option(help="Model whose chat template and tokens are shown.")] = "tiny",
    as_json: Annotated[bool, typer.Option("--json", help="Print the episode as JSON.")] = False,
) -> int:
    """Play an episode: you, a script or a model answer turn by turn.

    Shows what the model would get, its tools, the score and the metrics. breakpoint() and input() in the environment
    work as in any program. Ctrl-C ends it with exit code 130, Ctrl-D with the score so far.
    """
    from aitrain.cli.env_process import (
        check_environment,
        limit_threads,
        run_on_terminal,
    )  # here, because help needs none of it

    if model is not None and policy in ("person", "model"):
        policy, tokenizer = "model", model
    if policy not in POLICIES:
        raise ConfigError(f"--policy {policy}: use one of {', '.join(POLICIES)}.{did_you_mean(policy, POLICIES)}")
    if policy == "model" and model is None:
        raise ConfigError("--policy model: name it with --model, such as --model tiny")
    if model is not None and policy != "model":
        raise ConfigError(f"--model {model}: the answers are those of --policy {policy}; leave one of the two out")
    if (policy == "script") != (file is not None):
        raise ConfigError("--policy script FILE: the policy and its file belong together")
    if as_json and policy == "person":
        raise ConfigError(
            "--json: a person plays in the terminal; add --policy reference, --policy script FILE, or --model"
        )
    options = env_options(env, rl_env_config, keywords) | {"model": tokenizer}
    options |= {"rl_max_turns": max_turns} if max_turns else {}
    options |= {"rl_max_new_tokens": max_new_tokens} if max_new_tokens else {}
    check_environment(options)
    if model is not None:
        limit_threads(model)
    script = None if file is None else str(file)
    play = {"case": case, "seed": seed, "policy": policy, "script": script, "as_json": as_json}
    return run_on_terminal("aitrain.jobs.env_terminal", {"command": "play", "options": options, "play": play})
