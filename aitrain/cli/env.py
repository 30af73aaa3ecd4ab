"""`aitrain env`: write, check, play and inspect environments."""

import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

from aitrain.cli.flags import AsJson, RunName, group, print_json, with_options
from aitrain.errors import ConfigError
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig

EnvName = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="Environment, as in --rl-env: path/to/file.py:Class, package.module:Class, envs.gsm8k, or NAME:ID.",
    ),
]
Case = Annotated[str | None, typer.Option(help="One case: the number of its row, or its case_idx.")]
Tokenizer = Annotated[str, typer.Option(help="Model whose tokenizer and chat template are used; or `tiny`.")]

env = group("Write, check, play and inspect environments, each named as in --rl-env.")


def _on_terminal(command: str, options: Mapping[str, object], **arguments: object) -> int:
    """Become the process of a command of the workbench, which checks the options."""
    from aitrain.launch.command_processes import run_on_terminal  # here, because help does not need it

    request = {"command": command, "options": options, command: arguments}
    return run_on_terminal("aitrain.jobs.env_terminal", request)


# -- commands that run the environment


@env.command()
@with_options(TrainConfig, {"rl_env_config", "rl_score_range", "rl_max_turns", "rl_env_timeout", "rl_env_isolation"})
def check(
    env: EnvName,
    *,
    only: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Run these checks only, such as floor,shotgun.")
    ] = None,
    tokenizer: Tokenizer = "tiny",
    ask_judges: Annotated[
        bool, typer.Option("--ask-judges", help="Ask judges behind an address, which may cost something.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also show what is only worth knowing.")] = False,
    as_json: AsJson = False,
    **flags: object,
) -> int:
    """Find what is wrong with an environment before it costs a run.

    Exit code 3 if a check failed, else 0.
    """
    from aitrain.execution.process_tree import on_stop_signals
    from aitrain.ui.output import show_error
    from aitrain.workbench.check.process import messages_of, report

    names = [name.strip() for name in (only or "").split(",") if name.strip()]
    request = {"options": {**flags, "rl_env": env, "model": tokenizer}, "only": names, "ask_judges": ask_judges}
    with on_stop_signals(signal.default_int_handler):
        document = report(messages_of(request), (lambda _: None) if as_json else typer.echo, verbose)
    if as_json:
        print_json(document)
    elif "error" in document:
        show_error(document["error"], document["exit_code"])
    return int(document["exit_code"])


@env.command()
@with_options(TrainConfig, {"rl_env_config", "rl_max_turns", "rl_max_new_tokens", "thinking"})
def play(
    env: EnvName,
    *,
    policy: Annotated[
        Literal["person", "reference", "empty", "junk"],
        typer.Option(help="Who answers: person (you), reference (the environment's), empty (nothing), junk (noise)."),
    ] = "person",
    script: Annotated[
        str | None, typer.Option(metavar="FILE", help="This file answers: one reply a line, or a JSON list.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="This model answers: a Hub name, a folder, or tiny.")] = None,
    case: Case = "0",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episode.")] = 0,
    tokenizer: Tokenizer = "tiny",
    as_json: AsJson = False,
    **flags: object,
) -> int:
    """Play an episode: you, a script or a model answer turn by turn.

    Shows the conversation, the score and the metrics. breakpoint() and input() in the environment work as in any
    program. Ctrl-C ends it with exit code 130, Ctrl-D with the score so far.
    """
    if (policy != "person") + (script is not None) + (model is not None) > 1:
        raise ConfigError("--policy, --script and --model say who answers: give one of them")
    who: str = policy if script is None else "script"
    if model is not None:
        who, tokenizer = "model", model
    if as_json and who == "person":
        raise ConfigError("--json: a person plays in the terminal; add --policy reference, --script or --model")
    options = {**flags, "rl_env": env, "model": tokenizer}
    return _on_terminal("play", options, case=case, seed=seed, policy=who, script=script, as_json=as_json)


@env.command()
@with_options(TrainConfig, {"rl_env_config"})
def show(
    env: EnvName,
    *,
    cases: Annotated[int, typer.Option(min=0, help="How many cases, spread over the dataset.")] = 3,
    case: Case = None,
    tokenizer: Tokenizer = "tiny",
    as_json: AsJson = False,
    **flags: object,
) -> int:
    """Show sample cases as the model sees them.

    With their token counts, columns, tools and reference.
    """
    options = {**flags, "rl_env": env, "model": tokenizer}
    return _on_terminal("show", options, case=case, count=cases, as_json=as_json)


@env.command()
@with_options(TrainConfig, {"rl_env_config", "rl_env_workers", "rl_env_isolation", "seed"})
def serve(
    env: EnvName,
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    tokenizer: Tokenizer = "tiny",
    **flags: object,
) -> int:
    """Serve an environment to other machines.

    Trainings, evals and checks there name it as --rl-env http://HOST:PORT.

    Clients need the token of the variable AITRAIN_ENV_TOKEN, which has to be set here and there.
    """
    from aitrain.environment.served_environment import env_token

    env_token()
    if env.startswith(("http://", "https://")):
        raise ConfigError(f"{env} is served already")
    return _on_terminal("serve", {**flags, "rl_env": env, "model": tokenizer}, host=host, port=port)


@env.command()
@with_options(TrainConfig, {"rl_env", "rl_env_config"})
def rescore(
    run: RunName,
    *,
    step: Annotated[int | None, typer.Option(help="Episodes of this training step only.")] = None,
    most: Annotated[int, typer.Option("--limit", min=0, help="How many of the most changed episodes are shown.")] = 5,
    as_json: AsJson = False,
    **flags: object,
) -> int:
    """Apply today's scorer to a run's saved episodes: what changes?

    --rl-env names another scorer. Nothing is generated, and the run's files stay as they are. Episodes of several turns
    are replayed with their saved answers and seed; one in which the environment answers differently is not scored. The
    exit code is 3 if today's environment scores none of them.
    """
    from aitrain.runs.model_reference import read_model, run_options
    from aitrain.ui.run_registry import run_named

    folder = run_named(run)
    saved = run_options(folder.path, TrainConfig.model_fields)  # an eval has more
    with suppress(ConfigError):  # such as a run that was deleted: few environments use the tokenizer
        model = read_model(str(saved["model"]))
        saved["model"] = "tiny" if model.kind == "url" else model.base
    options = resolve(TrainConfig, None, flags, saved).model_dump(exclude_unset=True)
    return _on_terminal("rescore", options, run=str(folder.path), step=step, most=most, as_json=as_json)


# -- writing and finding environments


@env.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the environment, such as my_task.")],
    *,
    kind: Annotated[
        Literal["plain", "multi_turn", "tools", "tools_with_state", "service", "judges"],
        typer.Option(
            help="What it has: one turn; several turns; a tool; tools that change something; a score that asks a slow"
            " service; rows that judges score.",
        ),
    ] = "plain",
) -> int:
    """Write a new environment with its test: one readable file to edit.

    Writes NAME.py and test_NAME.py into the working directory. The environment is complete: it passes `aitrain env
    check`, and the tiny model learns it. Change its questions and its score into your own.
    """
    from aitrain.workbench.opening import write_environment

    file, test = write_environment(name, kind, Path.cwd())
    typer.echo(NEXT.format(name=name, file=file.name, test=test.name))
    return 0


NEXT = """\
Wrote {file} and its test, {test}. Edit, check, train:

  aitrain env check {file}

  aitrain grpo --model tiny --rl-env {file} --project-name {name} \\
      --rl-preset recommended --lr 4e-4 --max-steps 20"""
