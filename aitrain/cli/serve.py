"""`aitrain serve`: a trained model behind an OpenAI-compatible address, by vLLM, on 127.0.0.1."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from aitrain import packages
from aitrain.cli.flags import AsJson, Flag, given_flags, run_names, with_options
from aitrain.errors import ConfigError
from aitrain.options.generation import VLLMOptions
from aitrain.options.reading import resolve
from aitrain.options.run import ModelOptions

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

    Prints vLLM's command, and runs it in the place of this one. Clients must send a key: VLLM_API_KEY of the
    environment, else a random one, which is shown. Type and length are those of the training where they are not given.
    """
    from aitrain.launch.nvidia import visible_gpus  # these here, because help needs none of them
    from aitrain.named_models import named_folder
    from aitrain.runs.model_reference import read_model, run_options
    from aitrain.vllm.addresses import KEY_VARIABLE
    from aitrain.vllm.server_arguments import common_arguments
    from aitrain.vllm.server_process import GUARD, ServerConfig
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
    shown_base = None if first == name else first
    key = {} if print_only or os.environ.get(KEY_VARIABLE) else {KEY_VARIABLE: plan.key}
    url = f"http://127.0.0.1:{port}/v1"
    if as_json:
        typer.echo(json.dumps({"command": command, "url": url, "model": name, "base": shown_base, **key}))
    else:
        typer.echo(command)
    if print_only:
        return 0
    if packages.installed("vllm") is None:
        raise ConfigError('vLLM is not installed here: pip install "aitrain[vllm]", or run the command where it is.')
    check_port(port)
    if not as_json:
        typer.echo(f"\nserving at {url} as soon as vLLM says so  (stop with Ctrl-C)\n  model {name}")
        if shown_base is not None:
            typer.echo(f"  model {shown_base}, the base without the adapter")
        for variable, value in key.items():
            typer.echo(f"  export {variable}={value}")
    sys.stdout.flush()
    os.execve(sys.executable, [*plan.words(port), GUARD], plan.environment())


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
