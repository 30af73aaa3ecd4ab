"""`aitrain env rescore`: today's scorer on the saved episodes of a run."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from aitrain.cli.completion import run_names
from aitrain.cli.env_arguments import CONFIG_HELP, EnvKeywords
from aitrain.errors import ConfigError

if TYPE_CHECKING:
    from aitrain.runs.run_folder import RunFolder


def env_rescore(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", autocompletion=run_names, help="A run folder, or the name of a run in runs/."),
    ],
    *,
    env: Annotated[
        str | None, typer.Option("--rl-env", "--env", metavar="ENV", help="Another environment than the run's.")
    ] = None,
    rl_env_config: Annotated[str | None, typer.Option("--rl-env-config", metavar="JSON", help=CONFIG_HELP)] = None,
    keywords: EnvKeywords = None,
    step: Annotated[int | None, typer.Option(help="Episodes of this training step only.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Episodes of the last training step only.")] = False,
    most: Annotated[
        int, typer.Option("--limit", "--most", min=0, help="How many of the most changed episodes are shown.")
    ] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> int:
    """Apply today's scorer to the saved episodes of a run, and show what changes.

    Nothing is generated, and the run's files stay as they are. Episodes of several turns are replayed with their saved
    answers and seed; one in which the environment answers differently is not scored. The exit code is 3 if today's
    environment scores none of them.
    """
    from aitrain.cli.env_process import check_environment, run_on_terminal  # here, because help needs none of it
    from aitrain.runs.run_folder import RunFolder
    from aitrain.ui.run_registry import places

    if step is not None and last:
        raise ConfigError("--step and --last: give one of them")
    (path,) = places([run])
    folder = RunFolder(path)
    if not folder.config.is_file():
        raise ConfigError(f"{path} is not a run folder: it has no config.yaml\nList the runs with: aitrain runs {path}")
    options = _options(_saved(folder), env, rl_env_config, keywords or [])
    try:
        check_environment(options)
    except ConfigError as error:
        if env is not None or not str(error).startswith(("rl_env:", "rl_env_module:")):
            raise
        hint = "Name it with --rl-env, if its file has moved or the run was started in another folder."
        raise ConfigError(f"{error}\n{hint}") from None
    rescore = {"run": str(path), "step": step, "last": last, "most": most, "as_json": as_json}
    return run_on_terminal("aitrain.jobs.env_terminal", {"command": "rescore", "options": options, "rescore": rescore})


def _saved(folder: RunFolder) -> dict[str, object]:
    """The options of a run, or those of an eval that a run has as well."""
    from aitrain.options.evaluate import EvalConfig
    from aitrain.options.reading import read_file
    from aitrain.options.train import TrainConfig
    from aitrain.runs.eval_result import JOB
    from aitrain.runs.model_reference import read_model
    from aitrain.runs.run_folder import read_object

    if read_object(folder.status).get("job") != JOB:
        return read_file(TrainConfig, folder.config)
    saved = read_file(EvalConfig, folder.config)
    with suppress(ConfigError):  # such as a run that was deleted: few environments use the tokenizer
        model = read_model(str(saved["model"]))
        saved["model"] = "tiny" if model.kind == "url" else model.base
    return {name: value for name, value in saved.items() if name in TrainConfig.model_fields}


def _options(saved: dict[str, object], env: str | None, config: str | None, keywords: list[str]) -> dict[str, object]:
    """The run's options with the environment that scores."""
    from aitrain.cli.env_arguments import env_options

    if env is None and not any(saved.get(name) for name in ("rl_env", "rl_env_module")):
        raise ConfigError(
            "The run's environment was given in Python: name its file with --rl-env path/to/file.py:Class"
        )
    given = env_options(env or "", config, keywords)
    of_run = saved.get("rl_env_config")
    if config is None and isinstance(of_run, dict):
        given["rl_env_config"] = {**of_run, **dict(given.get("rl_env_config") or {})}  # type: ignore[call-overload]
    if env is None:
        del given["rl_env"]
        return {**saved, **given}
    named = ("rl_env", "rl_env_module", "rl_env_class")
    return {**{name: value for name, value in saved.items() if name not in named}, **given}
