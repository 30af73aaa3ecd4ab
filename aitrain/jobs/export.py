"""The process of `aitrain export`: `python -m aitrain.jobs.export FILE`, where FILE holds the request as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.utils import logging as transformers_logging

from aitrain.engines.scopes import savable_generation_config
from aitrain.errors import AitrainError, ConfigError, Interrupted, RunFailed
from aitrain.jobs.gguf import convert_to_gguf, refuse_existing_gguf
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.runs.export_request import DTYPES, ExportRequest
from aitrain.runs.json_values import as_object
from aitrain.runs.model_reference import ADAPTER_CONFIG, ModelReference, public_base, read_model, run_options
from aitrain.runs.new_folder import new_folder
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.training.hub import HubRepository, check_token
from aitrain.training.model import asking_hub, load_tokenizer, model_path
from aitrain.training.policy_loader import load_policy
from aitrain.training.saving import LogitCheck, planned_weights, write_whole_model
from aitrain.ui.card import try_to_write_card, write_short_card
from aitrain.ui.error_line import show_error
from aitrain.ui.escape_controls import escape_controls

CARD = "README.md"
NOT_UPLOADED = {"optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin", "manifest.json"}
"""Files that only the training reads."""


def main(request: ExportRequest) -> int:
    """Export as requested, and print the result; returns the exit code."""
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # the libraries' advice is for those who call them
    try:
        plan = Export(request, read_model(request.model))
        (_show_plan if request.dry_run else _carry_out)(plan)
        return 0
    except KeyboardInterrupt:
        print("\naitrain: stopped", file=sys.stderr)
        return Interrupted.exit_code
    except AitrainError as error:
        return show_error(str(error), error.exit_code, request.as_json)
    except Exception as error:
        what = " ".join(str(error).split())[:300]
        return show_error(f"The export failed: {type(error).__name__}: {what}", RunFailed.exit_code, request.as_json)


@dataclass
class Export:
    """One export: what is exported, and how."""

    request: ExportRequest
    reference: ModelReference

    @property
    def is_in_place(self) -> bool:
        """Whether a whole model is uploaded or converted where it is."""
        return self.reference.kind == "folder" and self.request.out is None

    @property
    def folder(self) -> Path:
        """The folder of the result."""
        return Path(self.reference.base) if self.is_in_place else self.request.folder(self.reference.label)

    @cached_property
    def options(self) -> dict[str, object]:
        """The options of the run that trained the model."""
        return run_options(self.reference)

    @cached_property
    def config(self) -> TrainConfig:
        """The options to load the model with. A base that the training quantized is loaded in full precision."""
        given = as_object(as_object(self.options.get("trl")).get("model_init_kwargs"))
        kept = {name: given[name] for name in ("revision",) if name in given}
        config = TrainConfig(
            model=self.reference.base,
            peft=self.reference.adapter is not None,
            trust_remote_code=self.request.trust_remote_code,
            trl={"model_init_kwargs": kept} if kept else {},
            vllm_args={},
        )
        return config.model_copy(update={"dtype": self.dtype})  # unchecked: float16 weights cannot be trained

    @cached_property
    def dtype(self) -> str:
        """The type of the weights: the requested one, or that of the training."""
        return self.request.dtype or next(found for found in self._recorded_dtypes() if found in DTYPES)

    def _recorded_dtypes(self) -> Iterator[object]:
        run, base = self.reference.run, self.reference.base
        if self.reference.adapter is None:
            yield read_object(Path(base) / "config.json").get("dtype")
        elif run is not None:
            yield read_object(RunFolder(run).model / "merged" / "config.json").get("dtype")
            yield self.options.get("dtype")
            known = {name: self.options[name] for name in TrainConfig.model_fields if name in self.options}
            had_gpus = bool(read_object(RunFolder(run).environment).get("gpus"))
            yield "bfloat16" if had_gpus and resolve(TrainConfig, None, known).may_halve_base else "float32"
        else:
            yield str(self.base_config.dtype).removeprefix("torch.")
        yield "float32"

    @cached_property
    def base_config(self) -> PretrainedConfig:
        """The configuration of the model, or of the base of the adapter."""
        path, remote = model_path(self.reference.base), self.request.trust_remote_code
        try:
            with asking_hub(path):
                return AutoConfig.from_pretrained(path, trust_remote_code=remote)
        except Exception as error:
            what = " ".join(str(error).split())[:200]
            raise ConfigError(f"model: cannot load {path}: {type(error).__name__}: {what}") from error

    @property
    def repository(self) -> HubRepository:
        """The repository to upload to."""
        request, name = self.request, self.reference.label.replace("+", "-")
        return HubRepository(name, request.repo_id, request.username, request.hub_private)

    def facts(self, files: dict[str, int]) -> dict[str, object]:
        """What a program wants to know of the export."""
        reference = self.reference
        return {
            "folder": str(self.folder),
            "base": None if reference.adapter is None else reference.base,
            "adapter": None if reference.adapter is None else str(reference.adapter),
            "run": None if reference.run is None else str(reference.run),
            "step": reference.step,
            "dtype": None if self.request.adapter_only else self.dtype,
            "files": files,
        }


# -- what is done


def _carry_out(plan: Export) -> None:
    request, folder = plan.request, plan.folder
    if request.push_to_hub:
        check_token()
        plan.repository.refuse_public()
    if request.gguf:
        refuse_existing_gguf(folder)
    check = None if plan.is_in_place else _write(plan)
    facts = plan.facts(_files(folder))
    if check is not None:
        facts |= {"logit_difference": check.difference, "adapter_effect": check.adapter_effect}
    if not request.as_json:
        _print_written(plan, check)
    if request.push_to_hub:
        _say("uploading")
        facts["repository"] = plan.repository.upload(folder, list(_files(folder)))
        _print(request, f"uploaded to {facts['repository']}")
    if request.gguf:
        _say("converting to GGUF")
        facts["gguf"] = str(convert_to_gguf(folder))
        _print(request, f"GGUF: {facts['gguf']}")
    if request.as_json:
        print(json.dumps(facts, indent=2))


def _write(plan: Export) -> LogitCheck | None:
    """Write the folder; returns None for an adapter, which is copied byte by byte."""
    refuse_unmergeable(plan)
    with new_folder(plan.folder) as partial:
        try:
            check = None if plan.request.adapter_only else _write_model(plan, partial)
            _write_small_files(plan, partial)
        except (OSError, SafetensorError) as error:
            why = " ".join(str(error).split())[:200]
            raise RunFailed(f"Cannot write {plan.folder}: {why}\nFree some disk space, or choose --out.") from error
    return check


def _write_model(plan: Export, partial: Path) -> LogitCheck:
    _say(f"loading {plan.reference.base} in {plan.dtype}, and merging" if plan.reference.adapter else "loading")
    return write_whole_model(lambda: load_policy(plan.reference, plan.config), partial, plan.request.shard_size)


def refuse_unmergeable(plan: Export) -> None:
    """Check that the adapter can become part of its base.

    Raises:
        ConfigError: the files of the base are quantized.
    """
    if plan.reference.adapter is None or plan.request.adapter_only:
        return
    quantization = getattr(plan.base_config, "quantization_config", None)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    raise ConfigError(
        f"{plan.reference.base} is quantized ({getattr(method, 'value', method)}): no adapter can be merged into it\n"
        "Export the adapter as it is with --adapter-only, or serve it beside its base:\n"
        f"  aitrain serve {plan.request.model}"
    )


def _write_small_files(plan: Export, place: Path) -> None:
    """What is beside the weights of an export: for an adapter its files, and the model card."""
    reference = plan.reference
    if plan.request.adapter_only and reference.adapter is not None:
        for file in (reference.adapter / ADAPTER_CONFIG, *reference.adapter.glob("adapter_model*.safetensors*")):
            shutil.copyfile(file, place / file.name)
        if (reference.adapter / "tokenizer_config.json").is_file():
            load_tokenizer(plan.config, str(reference.adapter)).save_pretrained(place)
    run = None if reference.run is None or reference.kind == "checkpoint" else RunFolder(reference.run)
    if run is not None and run.result.exists() and try_to_write_card(run, place) is None:
        return
    step = f" after step {reference.step}" if reference.step is not None else ""
    kind = "a LoRA adapter" if plan.request.adapter_only else "one whole model"
    text = f"{reference.label}: {public_base(reference.base)}, trained with GRPO by aitrain{step}, as {kind}."
    write_short_card(place, reference.label, reference.base, text)


def _files(folder: Path) -> dict[str, int]:
    """The files of an export with their sizes; hidden ones and those of a trainer are left out."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}
    return {
        name: size
        for name, size in names.items()
        if not any(part.startswith(".") for part in name.split("/")) and Path(name).name not in NOT_UPLOADED
    }


# -- what would be done


def _show_plan(plan: Export) -> None:
    """Print what would be written and uploaded. The weights are not loaded; all other files are made, and deleted."""
    refuse_unmergeable(plan)
    with tempfile.TemporaryDirectory(prefix="aitrain-export-") as temporary:
        place = plan.folder if plan.is_in_place else Path(temporary)
        weights = {} if plan.is_in_place or plan.request.adapter_only else _planned_model(plan, place)
        if not plan.is_in_place:
            _write_small_files(plan, place)
        files = dict(sorted((_files(place) | weights).items()))
        card = (place / CARD).read_text(encoding="utf-8", errors="replace") if (place / CARD).is_file() else ""
    repository, state = plan.repository.look() if plan.request.push_to_hub else ("", "new")
    if plan.request.as_json:
        upload = {"repository": repository, "state": state, "private": plan.request.hub_private}
        print(json.dumps(plan.facts(files) | (upload if repository else {}) | {"card": card}, indent=2))
        return
    if not plan.is_in_place:
        _print(plan.request, f"would write {plan.folder}{_in_dtype(plan)}")
    if repository:
        _print(plan.request, f"would upload to {repository}: {_state_text(plan, state)}")
    for name, size in files.items():
        _print(plan.request, f"  {'about ' if name in weights else '':>6}{_size(size):>9}  {name}")
    _print(plan.request, f"  {_size(sum(files.values())):>15}  in all")
    if card:
        _print(plan.request, f"model card ({CARD}):\n{card}")


def _planned_model(plan: Export, place: Path) -> dict[str, int]:
    """Write all files but the weights, and return their names with about their sizes."""
    policy = load_policy(plan.reference, plan.config, with_weights=False)
    policy.tokenizer.save_pretrained(place)
    policy.model.config.save_pretrained(place)
    with suppress(OSError):  # the model has none
        policy.model.generation_config = GenerationConfig.from_pretrained(model_path(plan.reference.base))
    with savable_generation_config(policy.model):
        policy.model.generation_config.save_pretrained(place)
    return planned_weights(policy.model, plan.request.shard_size)


def _state_text(plan: Export, state: str) -> str:
    kind = "private" if plan.request.hub_private else "public"
    if state == "public" and plan.request.hub_private:
        return "it exists and is public, so the upload is refused without --no-hub-private"
    if state == "unknown":
        return f"a {kind} repository, if it is new (the Hub could not be asked)"
    return f"a new {kind} repository" if state == "new" else f"it exists and is {state}"


# -- printed


def _print_written(plan: Export, check: LogitCheck | None) -> None:
    reference, files = plan.reference, _files(plan.folder)
    what = f"{plan.folder}  {len(files)} files, {_size(sum(files.values()))}{_in_dtype(plan)}"
    _print(plan.request, what if plan.is_in_place else f"exported {what}")
    if check is not None:
        _print(plan.request, check.sentence(getattr(torch, plan.dtype)))
    quantization = plan.options.get("quantization")
    if quantization and reference.adapter is not None and not plan.request.adapter_only:
        note = f"! The adapter was trained on the base in {quantization}; the export has the base in {plan.dtype}."
        _print(plan.request, note)


def _in_dtype(plan: Export) -> str:
    return "" if plan.request.adapter_only else f" in {plan.dtype}"


def _print(request: ExportRequest, text: str) -> None:
    if not request.as_json:
        print(escape_controls(text), flush=True)


def _say(text: str) -> None:
    print(f"{escape_controls(text)} ...", file=sys.stderr, flush=True)


def _size(count: int) -> str:
    for unit, amount in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= amount:
            return f"{count / amount:.1f} {unit}"
    return f"{count} B"


if __name__ == "__main__":
    sys.exit(main(ExportRequest(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
