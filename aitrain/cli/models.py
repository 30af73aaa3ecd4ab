"""Commands that use a trained model: `aitrain chat`, `aitrain export` and `aitrain serve`."""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from aitrain import packages
from aitrain.cli.flags import AsJson, run_argument, with_options
from aitrain.errors import ConfigError
from aitrain.options.generation import GenerationOptions
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig


@with_options(GenerationOptions)
def chat(
    model: Annotated[
        str,
        run_argument("MODEL", "A run folder, a checkpoint, an adapter, a model folder, a Hub name, or tiny."),
    ],
    *,
    only: Annotated[Literal["base", "tuned"] | None, typer.Option(metavar="base|tuned", help="One of the two.")] = None,
    system: Annotated[str, typer.Option(help="Begin with this system prompt.")] = "",
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the likeliest token each time.")] = False,
    **flags: object,
) -> int:
    """Talk to a trained model and its base.

    Questions from a pipe get one line of JSON each: echo "2 + 2 = ?" | aitrain chat runs/sums. Options of the run stay
    as they were, unless they are given here.
    """
    from aitrain.launch.command_processes import run_on_terminal

    request = {"model": model, "given": flags, "only": only, "system": system, "greedy": greedy}
    return run_on_terminal("aitrain.jobs.chat", request)


def export(
    model: Annotated[str, run_argument("RUN", "A run, a checkpoint, an adapter, or the folder of a whole model.")],
    *,
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder to write; unset: exports/NAME.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, typer.Option(help="Type of weights; unset: that of the base.")
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the base model.")] = False,
    as_json: AsJson = False,
) -> int:
    """Export a trained model: merged weights, tokenizer, chat template, generation config and model card.

    An adapter is merged into a copy of its base. The result is compared with base plus
    adapter before it gets its name.
    """
    from aitrain.launch.command_processes import run_on_terminal  # these here, because help needs none of them
    from aitrain.runs.model_reference import read_model
    from aitrain.runs.new_folder import refuse_existing

    reference = read_model(model)
    if reference.kind in ("hub", "url"):
        raise ConfigError(f"{model} is no run, checkpoint or adapter here\nList the runs with: aitrain show")
    folder = Path(os.path.expanduser(out or f"exports/{reference.label}"))
    refuse_existing(folder)  # before torch is imported
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # weights are added in memory: a GPU has less, and may be training
    request = {
        "model": model,
        "out": str(folder),
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "as_json": as_json,
    }
    return run_on_terminal("aitrain.jobs.export", request)


RECORDED = ("dtype", "model_max_length", "thinking")
"""Options that are those of the training, unless they are given."""


@with_options(TrainConfig, {*RECORDED, "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "trust_remote_code"})
def serve(
    model: Annotated[
        str,
        run_argument("RUN", "A run, a checkpoint, an adapter, a folder with a whole model, or a Hub name."),
    ],
    *,
    print_only: Annotated[bool, typer.Option("--print", help="Only print the command.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    as_json: AsJson = False,
    **flags: object,
) -> int:
    """Serve a trained model with vLLM on 127.0.0.1, an adapter beside its base, each by its own name.

    Prints vLLM's command, and becomes vLLM, whose output follows. Clients must send a key: VLLM_API_KEY of the
    environment, else a random one, which is shown. Thinking, type and length are those of the training where they are
    not given.
    """
    from aitrain.launch.hardware import visible_gpus  # these here, because help needs none of them
    from aitrain.rollout.thinking import template_variables
    from aitrain.runs.model_reference import read_model, run_options
    from aitrain.vllm.server_arguments import KEY_VARIABLE, LOOPBACK, common_arguments
    from aitrain.vllm.server_process import GUARD, VLLMServer, adapter_arguments, adapter_rank

    reference = read_model(model)
    if reference.kind == "url":
        raise ConfigError(f"{model} is the address of a server already")
    as_served = {"vllm_mode": "server", "peft": True}  # which may have any type
    config = resolve(TrainConfig, None, flags, {**as_served, **run_options(reference.run, {*RECORDED, "trl"})})
    folder = packages.named_folder(reference.base) or Path(reference.base).expanduser()
    name = reference.base if reference.kind == "hub" else reference.label
    gpus = visible_gpus()[: config.vllm_tensor_parallel_size]
    place = str(folder.resolve()) if folder.is_dir() else reference.base
    arguments = common_arguments(config, place, gpus, adapter_rank(reference))
    arguments["max_model_len"] = config.model_max_length or "auto"
    arguments |= adapter_arguments(reference, name)
    if variables := {**config.trl_table("chat_template_kwargs"), **template_variables(config.thinking)}:
        arguments["default_chat_template_kwargs"] = variables
    first = name if reference.adapter is None else f"{name}-base"
    server = VLLMServer(arguments, Path(os.devnull), gpus, first, takes_weights=False, port=port)
    command = server.shell_command()
    if print_only:
        typer.echo(json.dumps({"command": command}) if as_json else command)
        return 0
    if packages.installed("vllm") is None:
        raise ConfigError('vLLM is not installed here: pip install "aitrain[vllm]", or run the command where it is.')
    socket.create_server((LOOPBACK, port)).close()  # an error if it is taken: vLLM would share it with another vLLM
    facts = {"url": f"{server.url}/v1", "model": name}
    if first != name:
        facts["base"] = first
    if not os.environ.get(KEY_VARIABLE):
        facts[KEY_VARIABLE] = server.key
    lines = [command, "", *map(" ".join, facts.items()), ""]
    typer.echo(json.dumps(facts) if as_json else "\n".join(lines))
    os.execve(sys.executable, [*server.words(), GUARD], server.environment())
