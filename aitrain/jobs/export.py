"""The process of `aitrain export`: `python -m aitrain.jobs.export FILE`, where FILE holds the request as JSON."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from aitrain.engines.scopes import savable_generation_config
from aitrain.errors import ConfigError, RunFailed
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.packages import public_base
from aitrain.rollout.thinking import template_variables
from aitrain.runs.json_values import as_object
from aitrain.runs.model_reference import ADAPTER_CONFIG, ModelReference, read_model, run_options
from aitrain.runs.new_folder import new_folder
from aitrain.runs.requests import DTYPES, ExportRequest
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.training.loaded_policy import load_policy
from aitrain.training.model import load_configuration, load_model, load_tokenizer
from aitrain.training.saving import HubRepository, merged
from aitrain.ui.card import try_to_write_card, write_short_card
from aitrain.ui.output import escape_controls, run_job

NOT_UPLOADED = {"optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin", "manifest.json"}
"""Files that only the training reads."""

PROBE = (2, 32)
"""Rows and tokens of the random input on which logits are compared."""
TOLERANCE = 1e-3
"""Largest difference of float32 logits to those of base plus adapter, relative to the largest logit."""


def main(request: ExportRequest) -> int:
    """Export as requested, and print the result; returns the exit code."""
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # the libraries' advice is for those who call them

    def work() -> int:
        export(request)
        return 0

    return run_job(work, request.as_json, "export")


def export(request: ExportRequest) -> None:
    """Write the folder, and upload it, as requested; a whole model that only is uploaded stays where it is."""
    reference = read_model(request.model)
    adapter, base, options = reference.adapter, reference.base, run_options(reference)
    is_in_place = reference.kind == "folder" and request.out is None
    folder = Path(base) if is_in_place else request.folder(reference.label)
    name = reference.label.replace("+", "-")
    repository = HubRepository(name, request.repo_id, request.username, request.hub_private)
    if request.push_to_hub:
        repository.check()
    revision = as_object(as_object(options.get("trl")).get("model_init_kwargs")).get("revision")
    config = TrainConfig(
        model=reference.base,
        peft=adapter is not None,
        trust_remote_code=request.trust_remote_code,
        trl={"model_init_kwargs": {"revision": revision}} if revision else {},
        vllm_args={},
    )
    dtype = None if request.adapter_only else request.dtype or _trained_dtype(config, reference, options)
    in_dtype = f" in {dtype}" if dtype else ""
    check = None if is_in_place else _write(request, reference, folder, config, dtype)
    files = _files(folder)
    facts: dict[str, object] = {
        "folder": str(folder),
        "base": None if adapter is None else base,
        "adapter": None if adapter is None else str(adapter),
        "run": None if reference.run is None else str(reference.run),
        "step": reference.step,
        "dtype": dtype,
        "files": files,
    }

    def say(text: str) -> None:
        if not request.as_json:
            print(escape_controls(text), flush=True)

    size = f"{sum(files.values()) / 1e6:,.1f} MB"
    say(f"{'' if is_in_place else 'exported '}{folder}  {len(files)} files, {size}{in_dtype}")
    if check is not None:
        facts |= {"logit_difference": check.difference, "adapter_effect": check.adapter_effect}
        say(check.sentence(getattr(torch, str(dtype))))
    quantization = options.get("quantization")
    if quantization and adapter is not None and dtype:
        say(f"! The adapter was trained on the base in {quantization}; the export has the base{in_dtype}.")
    if variables := template_variables(options.get("thinking")):
        say(f"! It was trained with --thinking {options['thinking']}: give its chat template {variables}")
    if request.push_to_hub:
        _show_progress("uploading")
        facts["repository"] = repository.upload(folder, list(files))
        say(f"uploaded to {facts['repository']}")
    if request.as_json:
        print(json.dumps(facts, indent=2))


def _trained_dtype(config: TrainConfig, reference: ModelReference, options: dict[str, object]) -> str:
    """The type of the weights in the training."""
    if reference.adapter is None or reference.run is None:
        found = [str(load_configuration(config).dtype).removeprefix("torch.")]
    else:
        run = RunFolder(reference.run)
        known = {name: options[name] for name in TrainConfig.model_fields if name in options}
        is_half = bool(read_object(run.environment).get("gpus")) and resolve(TrainConfig, None, known).may_halve_base
        merged = read_object(run.model / "merged" / "config.json").get("dtype")
        found = [str(merged), str(options.get("dtype")), "bfloat16" if is_half else "float32"]
    return next((each for each in found if each in DTYPES), "float32")


def _write(
    request: ExportRequest, reference: ModelReference, folder: Path, config: TrainConfig, dtype: str | None
) -> LogitCheck | None:
    """Write the weights, or without a dtype the files of an adapter byte by byte, and the model card; returns None for
    an adapter. A base that the training quantized is loaded in full precision.

    Raises:
        ConfigError: the files of the base are quantized, so that the adapter cannot become part of it.
        RunFailed: the folder cannot be written.
    """
    adapter, check, quantization = reference.adapter, None, None
    if adapter is not None and dtype:
        quantization = getattr(load_configuration(config), "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ConfigError(
            f"{reference.base} is quantized ({getattr(method, 'value', method)}): no adapter can be merged into it\n"
            "Export the adapter as it is with --adapter-only, or serve it beside its base:\n"
            f"  aitrain serve {request.model}"
        )
    if dtype:
        config = config.model_copy(update={"dtype": dtype})  # unchecked: float16 weights cannot be trained
    with new_folder(folder) as place:
        try:
            if adapter is None or dtype:
                _show_progress(f"loading {reference.base} in {dtype}, and merging" if adapter else "loading")
                check = write_whole_model(reference, config, place)
            else:
                for file in (adapter / ADAPTER_CONFIG, *adapter.glob("adapter_model*.safetensors*")):
                    shutil.copyfile(file, place / file.name)
                if (adapter / "tokenizer_config.json").is_file():
                    load_tokenizer(config, str(adapter)).save_pretrained(place)
            run = None if reference.run is None or reference.kind == "checkpoint" else RunFolder(reference.run)
            if run is None or not run.result.exists() or try_to_write_card(run, place) is not None:
                step = f" after step {reference.step}" if reference.step is not None else ""
                kind = "one whole model" if dtype else "a LoRA adapter"
                base = public_base(reference.base)
                text = f"{reference.label}: {base}, trained with GRPO by aitrain{step}, as {kind}."
                write_short_card(place, reference.label, reference.base, text)
        except (OSError, SafetensorError) as error:
            why = " ".join(str(error).split())[:200]
            raise RunFailed(f"Cannot write {folder}: {why}\nFree some disk space, or choose --out.") from error
    return check


def _files(folder: Path) -> dict[str, int]:
    """The files of an export with their sizes; hidden ones and those of a trainer are left out."""
    sizes = dict[str, int]()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and "/." not in f"/{name}" and path.name not in NOT_UPLOADED:
            sizes[name] = path.stat().st_size
    return sizes


def _show_progress(text: str) -> None:
    print(f"{escape_controls(text)} ...", file=sys.stderr, flush=True)


# -- one whole model


@dataclass(frozen=True)
class LogitCheck:
    """Comparison of a written model, read back from its files, with the trained one."""

    difference: float
    """Largest difference between their logits."""
    adapter_effect: float | None
    """Largest difference that the adapter makes to the logits of its base; None without an adapter."""

    def sentence(self, dtype: torch.dtype) -> str:
        """The comparison in words, with a warning if rounding took away what was trained."""
        if self.adapter_effect is None:
            return f"largest logit difference to the trained model: {self.difference:.2g}"
        text = (
            f"largest logit difference to base plus adapter: {self.difference:.2g}"
            f" (the adapter itself changes them by {self.adapter_effect:.2g})"
        )
        if dtype == torch.float32 or self.difference < self.adapter_effect / 2:
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
    if dtype == torch.float32 and not check.difference <= TOLERANCE * max(1.0, _largest(trained)):
        raise RunFailed(
            f"The exported model does not compute what was trained: its logits differ by {check.difference:.2g}.\n"
            "It was not kept. With --adapter-only the adapter is exported as it is."
        )
    return check


def _logits(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(rows.to(model.device)).logits
    return logits.float().cpu()


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max())


if __name__ == "__main__":
    sys.exit(main(ExportRequest(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
