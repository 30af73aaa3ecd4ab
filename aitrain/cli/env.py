"""`aitrain env`: write, check, play and inspect environments."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

import typer

from aitrain.cli.flags import (
    AsJson,
    Flag,
    RunName,
    SectionedCommand,
    given_flags,
    group,
    print_json,
    with_options,
)
from aitrain.errors import AitrainError, ConfigError
from aitrain.options.evaluate import EvalConfig
from aitrain.options.reading import NOTHING, key_and_value, read_file, resolve
from aitrain.options.train import TrainConfig
from aitrain.options.value_types import read_json_object

PORT = 8000
Policy = Literal["person", "reference", "empty", "junk", "model", "script"]
HEADINGS = {
    "bundled": "Bundled",
    "installed": "Of installed packages (entry points in aitrain.environments)",
    "adapter": "Of other frameworks, by an adapter: --rl-env NAME:ID",
}

EnvName = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="Environment, as in --rl-env: path/to/file.py:Class, package.module:Class, envs.gsm8k, or NAME:ID.",
    ),
]
EnvKeywords = Annotated[
    list[str] | None,
    typer.Option(
        "-E",
        "--env-arg",
        metavar="KEY=VALUE",
        help="One keyword argument of the environment, as in -E size=100; JSON if it parses, else text. Repeatable;"
        " wins over --rl-env-config.",
    ),
]
Case = Annotated[str | None, typer.Option(help="One case: the number of its row, or its case_idx.")]
Tokenizer = Annotated[str, typer.Option(help="Model whose tokenizer and chat template are used; or `tiny`.")]

env = group("Write, check, play and inspect environments, each named as in --rl-env.")


def checked(
    flags: Mapping[str, Flag], keywords: Iterable[str] | None, saved: Mapping[str, object] = NOTHING
) -> TrainConfig:
    """The options of a command: those of a run, overridden by flags, with the keyword arguments of the environment
    below them. The environment is found and its file read, so that a misspelt name is refused at once.

    Raises:
        AitrainError: an option is wrong, or there is no such environment.
    """
    from aitrain.environment.loader import find_environments

    given: dict[str, object] = {**given_flags(flags)}
    if keywords:
        try:
            values = read_json_object(given.get("rl_env_config", saved.get("rl_env_config")))
        except ValueError as error:
            raise ConfigError(f"rl_env_config: {error}") from None
        given["rl_env_config"] = {
            **(values if isinstance(values, dict) else {}),
            **dict(key_and_value(text, "-E", "size=100", json.loads) for text in keywords),
        }
    config = resolve(TrainConfig, None, given, saved)
    find_environments(config)
    return config


def _on_terminal(command: str, config: TrainConfig, **arguments: object) -> int:
    """Run a command of the workbench in a process of its own; returns its exit code."""
    from aitrain.launch.command_processes import run_on_terminal  # here, because help does not need it

    return run_on_terminal(
        "aitrain.jobs.env_terminal",
        {"command": command, "options": config.model_dump(exclude_unset=True), command: arguments},
    )


# -- commands that run the environment


@env.command(cls=SectionedCommand)
@with_options(
    TrainConfig,
    {
        *("rl_env_config", "rl_score_range", "rl_max_turns", "rl_env_timeout", "rl_env_isolation"),
    },
)
def check(
    env: EnvName,
    env_arg: EnvKeywords = None,
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
    **flags: Flag,
) -> int:
    """Find what is wrong with an environment before it costs a run.

    Exit code 3 if a check failed, else 0.
    """
    from aitrain.execution.process_tree import on_stop_signals
    from aitrain.workbench.check.process import messages_of, report

    config = checked({**flags, "rl_env": env, "model": tokenizer}, env_arg)
    names = [name.strip() for name in (only or "").split(",") if name.strip()]
    request = {
        "options": config.model_dump(exclude_unset=True),
        "only": names,
        "ask_judges": ask_judges,
    }
    with on_stop_signals(signal.default_int_handler):
        document = report(messages_of(request), (lambda _: None) if as_json else typer.echo, verbose)
    if as_json:
        print_json(document)
    elif "error" in document:
        error = AitrainError(document["error"])
        error.exit_code = document["exit_code"]
        raise error
    return int(document["exit_code"])


@env.command(cls=SectionedCommand)
@with_options(TrainConfig, {"rl_env_config", "rl_max_turns", "rl_max_new_tokens", "thinking"})
def play(
    env: EnvName,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The replies, for --policy script.")] = None,
    *,
    policy: Annotated[
        Policy,
        typer.Option(
            help="Who answers: person (you), reference (the environment's), empty (nothing), junk (noise), model (with"
            " --model), or script FILE (one reply a line, or a JSON list).",
        ),
    ] = "person",
    model: Annotated[str | None, typer.Option(help="Model that plays: a Hub name, a folder, or tiny.")] = None,
    case: Case = "0",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episode.")] = 0,
    keywords: EnvKeywords = None,
    tokenizer: Tokenizer = "tiny",
    as_json: AsJson = False,
    **flags: Flag,
) -> int:
    """Play an episode: you, a script or a model answer turn by turn.

    Shows what the model would get, its tools, the score and the metrics. breakpoint() and input() in the environment
    work as in any program. Ctrl-C ends it with exit code 130, Ctrl-D with the score so far.
    """
    from aitrain.launch.command_processes import limit_threads

    if model is not None and policy in ("person", "model"):
        policy, tokenizer = "model", model
    if (policy == "model") != (model is not None):
        raise ConfigError("--policy model: it belongs together with --model, such as --model tiny")
    if (policy == "script") != (file is not None):
        raise ConfigError("--policy script FILE: the policy and its file belong together")
    if as_json and policy == "person":
        raise ConfigError(
            "--json: a person plays in the terminal; add --policy reference, --policy script FILE, or --model"
        )
    config = checked({**flags, "rl_env": env, "model": tokenizer}, keywords)
    if model is not None:
        limit_threads(model)
    script = None if file is None else str(file)
    return _on_terminal("play", config, case=case, seed=seed, policy=policy, script=script, as_json=as_json)


@env.command(cls=SectionedCommand)
@with_options(TrainConfig, {"rl_env_config"})
def show(
    env: EnvName,
    *,
    cases: Annotated[int, typer.Option(min=0, help="How many cases, spread over the dataset.")] = 3,
    case: Case = None,
    keywords: EnvKeywords = None,
    tokenizer: Tokenizer = "tiny",
    as_json: AsJson = False,
    **flags: Flag,
) -> int:
    """Show sample cases as the model sees them.

    With their token counts, columns, tools and reference.
    """
    config = checked({**flags, "rl_env": env, "model": tokenizer}, keywords)
    return _on_terminal("show", config, case=case, count=cases, as_json=as_json)


@env.command(cls=SectionedCommand)
@with_options(TrainConfig, {"rl_env_config", "rl_env_workers", "rl_env_isolation", "seed"})
def serve(
    env: EnvName,
    env_arg: EnvKeywords = None,
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    tokenizer: Tokenizer = "tiny",
    **flags: Flag,
) -> int:
    """Serve an environment to other machines.

    Trainings, evals and checks there name it as --rl-env http://HOST:PORT.

    Clients need the token of the variable AITRAIN_ENV_TOKEN, which has to be set here and there.
    """
    from aitrain.environment.served_environment import env_token

    env_token()
    if env.startswith(("http://", "https://")):
        raise ConfigError(f"{env} is served already")
    return _on_terminal("serve", checked({**flags, "rl_env": env, "model": tokenizer}, env_arg), host=host, port=port)


@env.command(cls=SectionedCommand)
@with_options(TrainConfig, {"rl_env_config"})
def rescore(
    run: RunName,
    *,
    env: Annotated[
        str | None,
        typer.Option("--rl-env", "--env", metavar="ENV", help="Another environment than the run's, or its new place."),
    ] = None,
    keywords: EnvKeywords = None,
    step: Annotated[int | None, typer.Option(help="Episodes of this training step only.")] = None,
    most: Annotated[int, typer.Option("--limit", min=0, help="How many of the most changed episodes are shown.")] = 5,
    as_json: AsJson = False,
    **flags: Flag,
) -> int:
    """Apply today's scorer to a run's saved episodes: what changes?

    Nothing is generated, and the run's files stay as they are. Episodes of several turns are replayed with their saved
    answers and seed; one in which the environment answers differently is not scored. The exit code is 3 if today's
    environment scores none of them.
    """
    from aitrain.runs.model_reference import read_model
    from aitrain.ui.run_registry import run_named

    folder = run_named(run)
    saved = read_file(EvalConfig, folder.config)  # of a training or an eval
    with suppress(ConfigError):  # such as a run that was deleted: few environments use the tokenizer
        model = read_model(str(saved["model"]))
        saved["model"] = "tiny" if model.kind == "url" else model.base
    kept = {name: value for name, value in saved.items() if name in TrainConfig.model_fields}
    config = checked({**flags, "rl_env": env}, keywords, kept)
    return _on_terminal("rescore", config, run=str(folder.path), step=step, most=most, as_json=as_json)


# -- writing and finding environments


@env.command(cls=SectionedCommand)
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the environment, such as my_task.")],
    *,
    multi_turn: Annotated[bool, typer.Option("--multi-turn", help="Episodes of several turns.")] = False,
    tools: Annotated[bool, typer.Option("--tools", help="A tool that the model may call.")] = False,
    service: Annotated[bool, typer.Option("--service", help="A score that asks a slow service.")] = False,
    judges: Annotated[bool, typer.Option("--judges", help="Rows that judges score.")] = False,
    as_json: AsJson = False,
) -> int:
    """Write a new environment with its test: one readable file to edit.

    Writes NAME.py and test_NAME.py into the working directory. The environment is complete: it passes `aitrain env
    check`, and the tiny model learns it. Change its questions and its score into your own.
    """
    from aitrain.workbench.opening import write_environment

    shapes = {"multi_turn": multi_turn, "tools": tools, "service": service, "judges": judges}
    chosen = [kind for kind, is_chosen in shapes.items() if is_chosen] or ["plain"]
    kind = "tools_with_state" if chosen == ["multi_turn", "tools"] else chosen[0]
    if len(chosen) > 1 and kind != "tools_with_state":
        raise ConfigError("--service, --judges: give one alone, and copy its methods into another environment")
    file, test = write_environment(name, kind, Path.cwd())
    files = {"file": file.name, "test": test.name}
    typer.echo(json.dumps(files) if as_json else NEXT.format(name=name, **files))
    return 0


NEXT = """\
Wrote {file} and its test, {test}. Edit, check, train:

  aitrain env check {file}

  aitrain grpo --model tiny --rl-env {file} --project-name {name} \\
      --rl-preset recommended --lr 4e-4 --max-steps 20"""


@env.command("list", cls=SectionedCommand)
def list_environments(as_json: AsJson = False) -> int:
    """List the environments that can be named with --rl-env.

    Nothing is imported: packages are found by their metadata.
    """
    from aitrain.environment.loader import listed_environments
    from aitrain.ui.output import escape_controls

    listed = listed_environments()
    if as_json:
        print_json([asdict(one) for one in listed])
        return 0
    for source, environments in groupby(listed, lambda one: one.source):
        typer.echo(HEADINGS[source])
        for one in environments:
            lines = [f"  {one.rl_env}", one.summary, *one.problem.splitlines()]
            typer.echo(escape_controls("\n      ".join(lines)))
        typer.echo()
    typer.echo("Your own: --rl-env path/to/file.py:Class. Write one with: aitrain env init my_task")
    return 0
