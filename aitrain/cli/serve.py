"""`aitrain serve`: a trained model behind an OpenAI-compatible address, by vLLM, on 127.0.0.1."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from aitrain import packages
from aitrain.cli.flags import AsJson, Flag, given_flags, run_names, with_options
from aitrain.errors import ConfigError, RunFailed
from aitrain.options.generation import VLLMOptions
from aitrain.options.reading import resolve
from aitrain.options.run import ModelOptions

POLL_SECONDS = 0.5
RECORDED = ("dtype", "model_max_length")
"""Options that are those of the training, unless they are given."""


class ServeConfig(ModelOptions, VLLMOptions):
    """The options of a training that serving has as well."""


@with_options(ServeConfig, {*RECORDED, "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "trust_remote_code"})
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            autocompletion=run_names,
            help="A run, a checkpoint, an adapter, a folder with a whole model, or a Hub name.",
        ),
    ],
    *,
    print_only: Annotated[bool, typer.Option("--print", help="Only print the command.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    as_json: AsJson = False,
    **flags: Flag,
) -> int:
    """Serve a trained model with vLLM on 127.0.0.1, an adapter beside its base, each by its own name.

    Prints vLLM's command first. Clients must send a key: VLLM_API_KEY of the environment, else a random one, which is
    shown. Type and length are those of the training where they are not given.
    """
    from aitrain.launch.nvidia import visible_gpus  # these here, because help needs none of them
    from aitrain.named_models import named_folder
    from aitrain.runs.model_reference import read_model, run_options
    from aitrain.vllm.addresses import KEY_VARIABLE
    from aitrain.vllm.server_arguments import common_arguments
    from aitrain.vllm.server_process import ServerConfig, running
    from aitrain.vllm.serving import adapter_arguments, adapter_rank, shell_command

    reference, gpus = read_model(model), visible_gpus()
    if reference.kind == "url":
        raise ConfigError(f"{model} is the address of a server already")
    recorded = {name: value for name, value in run_options(reference).items() if name in RECORDED}
    config = resolve(ServeConfig, None, given_flags(flags), recorded)
    folder = named_folder(reference.base) or Path(reference.base).expanduser()
    name = reference.base if reference.kind == "hub" else reference.label
    base = folder.name if folder.is_dir() and named_folder(reference.base) is None else reference.base
    if base == name and reference.adapter is not None:
        base = f"{name}-base"
    gpus = gpus[: config.vllm_tensor_parallel_size]
    arguments = common_arguments(
        str(folder.resolve()) if folder.is_dir() else reference.base,
        gpus,
        lora_rank=adapter_rank(reference),
        dtype=config.dtype if gpus or config.dtype != "auto" else "float32",
        memory=config.vllm_gpu_memory_utilization or 0.9,
        tensor_parallel=config.vllm_tensor_parallel_size,
        trust_remote_code=config.trust_remote_code,
    )
    arguments["max_model_len"] = config.model_max_length or "auto"
    arguments |= adapter_arguments(reference, name)
    first = name if reference.adapter is None else base
    plan = ServerConfig(arguments, Path(os.devnull), gpus, first, takes_weights=False)
    command = shell_command(plan, port)
    typer.echo(json.dumps({"command": command}) if as_json else command)
    if print_only:
        return 0
    if packages.installed("vllm") is None:
        raise ConfigError('vLLM is not installed here: pip install "aitrain[vllm]", or run the command where it is.')
    check_port(port)
    handle, log = tempfile.mkstemp(prefix="aitrain-serve-", suffix=".log")
    os.close(handle)
    plan = replace(plan, log=Path(log))
    for number in (signal.SIGINT, signal.SIGTERM):  # background jobs of a shell ignore Ctrl-C by default
        signal.signal(number, signal.default_int_handler)
    typer.echo(f"vLLM's output is in {plan.log}", err=True)
    with running([plan], _show_progress, port) as (server,):
        try:
            key = {} if os.environ.get(KEY_VARIABLE) else {KEY_VARIABLE: plan.key}
            if as_json:
                shown_base = None if first == name else first
                typer.echo(json.dumps({"url": f"{server.url}/v1", "model": name, "base": shown_base, **key}))
            else:
                typer.echo(f"\nserving at {server.url}/v1  (stop with Ctrl-C)\n  model {name}")
                if first != name:
                    typer.echo(f"  model {first}, the base without the adapter")
                for variable, value in key.items():
                    typer.echo(f"  export {variable}={value}")
            while (code := server.poll()) is None:
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            typer.echo("stopping vLLM", err=True)
            plan.log.unlink(missing_ok=True)
            return 0
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise RunFailed(f"vLLM's server ended by itself ({how})\nSee {plan.log}")


def check_port(port: int) -> None:
    """Check that nothing listens on the port: vLLM would share it with another vLLM without an error.

    Raises:
        ConfigError: something does.
    """
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError as error:
            why = f"port: cannot listen on 127.0.0.1:{port}: {error.strerror}"
            raise ConfigError(f"{why}\nChoose another with --port.") from None


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r{text}", nl=False, err=True)
