"""`aitrain serve`: a trained model behind an OpenAI-compatible address, by vLLM, on 127.0.0.1."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aitrain.cli.flags import AsJson, run_names
from aitrain.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from aitrain.vllm.serving import ServedModel

PORT = 8000
POLL_SECONDS = 0.5


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
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = PORT,
    dtype: Annotated[str | None, typer.Option(help="Type of the weights; unset: as in training.")] = None,
    model_max_length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Maximum tokens of prompt and completion together; unset: as in training, else what fits."
        ),
    ] = None,
    vllm_gpu_memory_utilization: Annotated[float, typer.Option(help="Fraction of each GPU's memory.")] = 0.9,
    vllm_tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that share the model.")] = 1,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the model.")] = False,
    as_json: AsJson = False,
) -> int:
    """Serve a trained model with vLLM on 127.0.0.1, an adapter beside its base, each by its own name.

    Prints vLLM's command first. Clients must send a key: VLLM_API_KEY of the environment, else a random one, which is
    shown.
    """
    from aitrain.launch.nvidia import visible_gpus  # these here, because help needs none of them
    from aitrain.named_models import named_folder
    from aitrain.packages import installed
    from aitrain.runs.export_request import DTYPES
    from aitrain.runs.model_reference import read_model, run_options
    from aitrain.vllm.serving import ServedModel, adapter_rank

    if dtype not in (None, "auto", *DTYPES):
        raise ConfigError(f"--dtype {dtype}: use one of auto, {', '.join(DTYPES)}")
    reference = read_model(model)
    if reference.kind == "url":
        raise ConfigError(f"{model} is the address of a server already")
    folder = named_folder(reference.base) or Path(reference.base).expanduser()
    options, gpus = run_options(reference), visible_gpus()
    recorded, length = options.get("dtype"), options.get("model_max_length")
    trained_in = recorded if isinstance(recorded, str) and recorded != "auto" else "auto" if gpus else "float32"
    plan = ServedModel(
        model=str(folder.resolve()) if folder.is_dir() else reference.base,
        log=Path(os.devnull),
        gpus=gpus[:vllm_tensor_parallel_size],
        tensor_parallel=vllm_tensor_parallel_size,
        context=model_max_length or (length if isinstance(length, int) else None),
        lora_rank=adapter_rank(reference),
        dtype=dtype or trained_in,
        memory=vllm_gpu_memory_utilization,
        trust_remote_code=trust_remote_code,
        name=reference.base if reference.kind == "hub" else reference.label,
        base_name=folder.name if folder.is_dir() and named_folder(reference.base) is None else reference.base,
        adapter=reference.adapter,
    )
    typer.echo(json.dumps({"command": plan.command(port)}) if as_json else plan.command(port))
    if print_only:
        return 0
    if installed("vllm") is None:
        raise ConfigError('vLLM is not installed here: pip install "aitrain[vllm]", or run the command where it is.')
    _check_port(port)
    handle, log = tempfile.mkstemp(prefix="aitrain-serve-", suffix=".log")
    os.close(handle)
    return _serve(replace(plan, log=Path(log)), port, as_json)


def _check_port(port: int) -> None:
    """Check that nothing listens on the port: vLLM would share it with another vLLM without an error."""
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port: cannot listen on 127.0.0.1:{port}: {error.strerror}\nChoose another with --port."
            ) from None


def _serve(plan: ServedModel, port: int, as_json: bool) -> int:
    """Run the server until Ctrl-C, SIGTERM, or its own end."""
    from aitrain.vllm.addresses import KEY_VARIABLE
    from aitrain.vllm.server_process import VLLMServer

    for number in (signal.SIGINT, signal.SIGTERM):  # background jobs of a shell ignore Ctrl-C by default
        signal.signal(number, signal.default_int_handler)
    typer.echo(f"vLLM's output is in {plan.log}", err=True)
    with VLLMServer.start(plan, _show_progress, port) as server:
        try:
            key = {} if os.environ.get(KEY_VARIABLE) else {KEY_VARIABLE: plan.key}
            base = plan.names("")[0] if plan.adapter else None
            up = {"url": f"{server.url}/v1", "model": plan.name, "base": base, **key}
            typer.echo(json.dumps(up) if as_json else _introduction(plan, server.url, key))
            while (code := server.poll()) is None:
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            typer.echo("stopping vLLM", err=True)
            plan.log.unlink(missing_ok=True)
            return 0
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    raise RunFailed(f"vLLM's server ended by itself ({how})\nSee {plan.log}")


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r{text}", nl=False, err=True)


def _introduction(plan: ServedModel, url: str, key: Mapping[str, str]) -> str:
    """The address, the models, a key that was made, and a first request, which has the key in no argument."""
    request = json.dumps({"model": plan.name, "messages": [{"role": "user", "content": "Hello"}]})
    lines = [f"\nserving at {url}/v1  (stop with Ctrl-C)", f"  model {plan.name}"]
    if plan.adapter is not None:
        lines.append(f"  model {plan.names('')[0]}, the base without the adapter")
    lines += [f"  export {name}={value}" for name, value in key.items()]
    curl = f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{request}'"
    return "\n".join([*lines, f'  {curl} -H @- <<< "Authorization: Bearer $VLLM_API_KEY"'])
