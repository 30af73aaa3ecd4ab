"""`aitrain export`: a trained model as a folder that other programs load, or on the Hub."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, Flag, given_flags, run_names, with_options
from aitrain.cli.terminal_process import run_on_terminal
from aitrain.errors import ConfigError
from aitrain.options.reading import resolve
from aitrain.options.run import HubOptions
from aitrain.runs.export_request import DTYPES, ExportRequest
from aitrain.runs.model_reference import read_model
from aitrain.runs.new_folder import refuse_existing


@with_options(HubOptions)
def export(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            autocompletion=run_names,
            help="A run, a checkpoint, an adapter, or the folder of a whole model (for --push-to-hub).",
        ),
    ],
    *,
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help="Folder to write; unset: exports/NAME.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; unset: as in training.")] = None,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Export the adapter as it is, to be loaded beside its base.")
    ] = False,
    shard_size: Annotated[str, typer.Option(help="Maximum size of a weight file, such as 500MB.")] = "5GB",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the base model.")] = False,
    as_json: AsJson = False,
    **flags: Flag,
) -> int:
    """Export a trained model: merged weights, tokenizer, chat template, generation config and model card.

    An adapter is merged into a copy of its base, in the dtype of the training. The result is compared with base plus
    adapter before it gets its name.
    """
    hub = resolve(HubOptions, None, given_flags(flags))
    push_to_hub = hub.push_to_hub
    request = ExportRequest(
        model, out, dtype, adapter_only, shard_size, push_to_hub, hub.repo_id, hub.username, hub.hub_private,
        trust_remote_code, as_json,
    )  # fmt: skip
    if dtype not in (None, *DTYPES):
        raise ConfigError(f"--dtype {dtype}: use one of {', '.join(DTYPES)}")
    if not re.fullmatch(r"[1-9]\d*[KMGT]B", shard_size):
        raise ConfigError(f"--shard-size {shard_size}: write a number and KB, MB, GB or TB, such as 500MB")
    reference = read_model(model)
    if reference.kind in ("hub", "url"):
        from aitrain.ui.run_registry import places

        places([model])  # raises, with what is near
        raise ConfigError(f"{model} is no run, checkpoint or adapter here")
    if adapter_only and reference.adapter is None:
        raise ConfigError(f"--adapter-only: {model} has no adapter, all of its weights were trained")
    if reference.kind == "folder" and out is None and not push_to_hub:
        raise ConfigError(f"{model} is a whole model already\nUse --push-to-hub, or --out for a copy.")
    if reference.kind != "folder" or out is not None:
        folder = request.folder(reference.label)
        if push_to_hub and (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} exists already\nUpload it with: aitrain export {folder} --push-to-hub\n"
                "Or write the model again into another folder, with --out."
            )
        refuse_existing(folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # weights are added in memory: a GPU has less, and may be training
    return run_on_terminal("aitrain.jobs.export", asdict(request))
