"""The process of `aitrain export`, started as ui/output.py says."""

import gc
import json
import sys
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from aitrain.engines.scopes import savable_generation_config
from aitrain.errors import ConfigError, RunFailed
from aitrain.options.train import TrainConfig
from aitrain.rollout.thinking import template_variables
from aitrain.runs.json_values import as_object
from aitrain.runs.model_reference import ModelReference, read_model, run_options
from aitrain.runs.new_folder import new_folder
from aitrain.runs.run_folder import RunFolder
from aitrain.training.loaded_policy import load_policy
from aitrain.training.model import load_configuration, load_model
from aitrain.training.saving import merged
from aitrain.ui.card import try_to_write_card
from aitrain.ui.output import escape_controls, run_job

PROBE = (2, 32)
"""Rows and tokens of the random input on which logits are compared."""
TOLERANCE = 1e-3
"""Largest difference of float32 logits to those of base plus adapter, relative to the largest logit."""


def main(request: dict[str, Any]) -> int:
    """Export as requested, and print the result; returns the exit code."""
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # the libraries' advice is for those who call them
    return run_job(partial(export, **request), request["as_json"], "export")


def export(model: str, out: str, dtype: str | None, trust_remote_code: bool, as_json: bool) -> None:
    """Write the folder `out`, with weights of a type, by default that of the base. A base that the training quantized
    is loaded in full precision.

    Raises:
        ConfigError: the files of the base are quantized, so that the adapter cannot become part of it.
        RunFailed: the model in the folder computes something else.
    """
    reference, folder = read_model(model), Path(out)
    is_adapter, options = reference.adapter is not None, run_options(reference.run)
    revision = as_object(as_object(options.get("trl")).get("model_init_kwargs")).get("revision")
    config = TrainConfig(
        model=reference.base,
        peft=is_adapter,
        trust_remote_code=trust_remote_code,
        trl={"model_init_kwargs": {"revision": revision}} if revision else {},
        vllm_args={},
    )
    configuration = load_configuration(config)
    if is_adapter and getattr(configuration, "quantization_config", None) is not None:
        raise ConfigError(
            f"{reference.base} is quantized: no adapter can be merged into it\n"
            f"Serve the adapter beside its base: aitrain serve {model}"
        )
    own = str(configuration.dtype).removeprefix("torch.")
    dtype = dtype or (own if own in ("float32", "bfloat16", "float16") else "float32")
    print(f"loading {escape_controls(reference.base)} in {dtype} ...", file=sys.stderr, flush=True)
    with new_folder(folder) as place:
        # unchecked: float16 weights cannot be trained
        check = write_whole_model(reference, config.model_copy(update={"dtype": dtype}), place)
        run = None if reference.run is None else RunFolder(reference.run)
        if run is not None and reference.kind != "checkpoint" and run.result.exists():
            try_to_write_card(run, place)
    files = {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }
    facts = {**reference.facts, "folder": str(folder), "dtype": dtype, "files": files, **asdict(check)}
    size = sum(files.values()) / 1e6
    said = [f"exported {folder}  {len(files)} files, {size:,.1f} MB in {dtype}", check.sentence(dtype)]
    if (quantization := options.get("quantization")) and is_adapter:
        said.append(f"! The adapter was trained on the base in {quantization}; the export has the base in {dtype}.")
    if variables := template_variables(options.get("thinking")):
        said.append(f"! It was trained with --thinking {options['thinking']}: give its chat template {variables}")
    print(json.dumps(facts, indent=2, default=str) if as_json else escape_controls("\n".join(said)))


# -- one whole model


@dataclass(frozen=True)
class LogitCheck:
    """Comparison of a written model, read back from its files, with the trained one."""

    logit_difference: float
    """Largest difference between their logits."""
    adapter_effect: float | None
    """Largest difference that the adapter makes to the logits of its base; None without an adapter."""

    def sentence(self, dtype: str) -> str:
        """The comparison in words, with a warning if rounding took away what was trained."""
        if self.adapter_effect is None:
            return f"largest logit difference to the trained model: {self.logit_difference:.2g}"
        text = (
            f"largest logit difference to base plus adapter: {self.logit_difference:.2g}"
            f" (the adapter itself changes them by {self.adapter_effect:.2g})"
        )
        if dtype == "float32" or self.logit_difference < self.adapter_effect / 2:
            return text
        return f"{text}\n! Rounding takes away much of what was trained: export with --dtype float32"


def write_whole_model(reference: ModelReference, config: TrainConfig, folder: Path) -> LogitCheck:
    """Load a model, merge its adapter, if there is one, and write weights and tokenizer.

    Raises:
        RunFailed: the written model computes something else. Half precision rounds too much to tell.
    """
    policy = load_policy(reference, config)
    config, tokenizer, model = policy.config, policy.tokenizer, policy.model
    tokens = model.get_input_embeddings().weight.shape[0]
    rows = torch.randint(0, tokens, PROBE, generator=torch.Generator().manual_seed(0))
    del policy
    trained, effect = _logits(model, rows), None
    if isinstance(model, PeftModel):
        with model.disable_adapter():
            effect = _largest(trained - _logits(model, rows))
        model = merged(model)
    model.config.use_cache = True  # off where a training saved it
    with savable_generation_config(model):
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    dtype = model.dtype
    del model
    gc.collect()  # so that there is never a second copy in memory
    written = load_model(config.model_copy(update={"model": str(folder)}), dtype).eval()
    check = LogitCheck(_largest(_logits(written, rows) - trained), effect)
    if dtype == torch.float32 and not check.logit_difference <= TOLERANCE * max(1.0, _largest(trained)):
        raise RunFailed(
            "The exported model does not compute what was trained:"
            f" its logits differ by {check.logit_difference:.2g}.\nIt was not kept: use aitrain serve."
        )
    return check


def _logits(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(rows.to(model.device)).logits
    return logits.float().cpu()


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())
