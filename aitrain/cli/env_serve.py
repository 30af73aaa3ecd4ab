"""`aitrain env serve`: an environment for trainings on other machines."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from aitrain.cli.env_arguments import EnvConfig, EnvKeywords, EnvName, env_options
from aitrain.errors import ConfigError

PORT = 8000
HOST_HELP = "Address to listen on; others than 127.0.0.1 need the variable AITRAIN_ENV_TOKEN."
WORKERS_HELP = "Concurrent calls to the environment; unset: 64 (in processes: 4 for each CPU core)."
TOKENIZER_HELP = "Model whose tokenizer build_dataset gets, if it uses it; that of the training."


def env_serve(
    env: EnvName,
    rl_env_config: EnvConfig = None,
    env_arg: EnvKeywords = None,
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = PORT,
    host: Annotated[str, typer.Option(help=HOST_HELP)] = "127.0.0.1",
    rl_env_workers: Annotated[int | None, typer.Option(min=1, help=WORKERS_HELP)] = None,
    rl_env_isolation: Annotated[str | None, typer.Option(help="Where calls run: thread or process.")] = None,
    tokenizer: Annotated[str, typer.Option(help=TOKENIZER_HELP)] = "tiny",
    seed: Annotated[int | None, typer.Option(help="Seed of random rows; that of the training.")] = None,
) -> int:
    """Serve an environment to trainings, evals and checks on other machines: --rl-env http://HOST:PORT.

    Clients need a token: AITRAIN_ENV_TOKEN of the environment, which they must have as well; else a random one, which
    those of this user and this machine find in a file.
    """
    from aitrain.cli.env_process import check_environment, run_on_terminal  # here, because help needs none of it

    if host not in ("127.0.0.1", "localhost", "::1") and not os.environ.get("AITRAIN_ENV_TOKEN"):
        raise ConfigError(
            f"--host {host}: whoever reaches the port could run the environment's tools\n"
            "Set AITRAIN_ENV_TOKEN to a long random text, here and where the training runs."
        )
    if env.startswith(("http://", "https://")):
        raise ConfigError(f"{env} is served already")
    given = {"rl_env_workers": rl_env_workers, "rl_env_isolation": rl_env_isolation, "seed": seed, "model": tokenizer}
    options = env_options(env, rl_env_config, env_arg) | {name: one for name, one in given.items() if one is not None}
    check_environment(options)
    place = {"host": host, "port": port}
    return run_on_terminal("aitrain.jobs.env_terminal", {"command": "serve", "options": options, "serve": place})
