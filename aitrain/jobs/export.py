"""The process of `aitrain export`: `python -m aitrain.jobs.export FILE`, where FILE holds the request as JSON."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import logging as transformers_logging

from aitrain.errors import ConfigError, RunFailed
from aitrain.jobs.terminal_job import run_job
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.runs.checkpoint import STAGING
from aitrain.runs.export_request import DTYPES, ExportRequest
from aitrain.runs.json_values import as_object
from aitrain.runs.model_reference import ADAPTER_CONFIG, ModelReference, public_base, read_model, run_options
from aitrain.runs.new_folder import new_folder
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.training.hub import HubRepository, check_token
from aitrain.training.model import asking_hub, load_policy, load_tokenizer, model_path
from aitrain.training.saving import LogitCheck, write_whole_model
from aitrain.ui.card import try_to_write_card, write_short_card
from aitrain.ui.escape_controls import escape_controls

NOT_UPLOADED = {"optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin", "manifest.json"}
"""Files that only the training reads."""
SCRIPT = "convert_hf_to_gguf.py"
"""llama.cpp's converter, a script of its repository that no package contains."""
VARIABLE = "LLAMA_CPP"
"""Environment variable with the folder of llama.cpp."""
GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
"""Types of GGUF that keep every bit."""


def main(request: ExportRequest) -> int:
    """Export as requested, and print the result; returns the exit code."""
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # the libraries' advice is for those who call them

    def work() -> int:
        carry_out(Export(request, read_model(request.model)))
        return 0

    return run_job(work, request.as_json, "export")


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
    def in_dtype(self) -> str:
        """` in bfloat16`; empty for an adapter, which is copied."""
        return "" if self.request.adapter_only else f" in {self.dtype}"

    def print(self, text: str) -> None:
        """Print a line, unless the result is printed as JSON."""
        if not self.request.as_json:
            print(escape_controls(text), flush=True)


# -- what is done


def carry_out(plan: Export) -> None:
    """Write the folder, and upload and convert it, as requested."""
    request, folder, adapter = plan.request, plan.folder, plan.reference.adapter
    file = folder.with_name(f"{folder.name}.gguf")
    name = plan.reference.label.replace("+", "-")
    repository = HubRepository(name, request.repo_id, request.username, request.hub_private)
    if request.push_to_hub:
        check_token()
        repository.refuse_public()
    if request.gguf and file.exists():
        raise ConfigError(f"--gguf: {file} exists, and is not overwritten\nDelete it first.")
    check = None if plan.is_in_place else _write(plan)
    files = _files(folder)
    reference = plan.reference
    facts: dict[str, object] = {
        "folder": str(folder),
        "base": None if adapter is None else reference.base,
        "adapter": None if adapter is None else str(adapter),
        "run": None if reference.run is None else str(reference.run),
        "step": reference.step,
        "dtype": None if request.adapter_only else plan.dtype,
        "files": files,
    }
    what = f"{folder}  {len(files)} files, {_size(sum(files.values()))}{plan.in_dtype}"
    plan.print(what if plan.is_in_place else f"exported {what}")
    if check is not None:
        facts |= {"logit_difference": check.difference, "adapter_effect": check.adapter_effect}
        plan.print(check.sentence(getattr(torch, plan.dtype)))
    quantization = plan.options.get("quantization")
    if quantization and adapter is not None and not request.adapter_only:
        plan.print(f"! The adapter was trained on the base in {quantization}; the export has the base{plan.in_dtype}.")
    if request.push_to_hub:
        _say("uploading")
        facts["repository"] = repository.upload(folder, list(files))
        plan.print(f"uploaded to {facts['repository']}")
    if request.gguf:
        _say("converting to GGUF")
        _convert_to_gguf(folder, file)
        facts["gguf"] = str(file)
        plan.print(f"GGUF: {file}")
    if request.as_json:
        print(json.dumps(facts, indent=2))


def _write(plan: Export) -> LogitCheck | None:
    """Write the weights, or the files of an adapter byte by byte, and the model card; returns None for an adapter.

    Raises:
        ConfigError: the files of the base are quantized, so that the adapter cannot become part of it.
        RunFailed: the folder cannot be written.
    """
    request, reference, adapter = plan.request, plan.reference, plan.reference.adapter
    quantization = None
    if adapter is not None and not request.adapter_only:
        quantization = getattr(plan.base_config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        raise ConfigError(
            f"{reference.base} is quantized ({getattr(method, 'value', method)}): no adapter can be merged into it\n"
            "Export the adapter as it is with --adapter-only, or serve it beside its base:\n"
            f"  aitrain serve {request.model}"
        )
    check = None
    with new_folder(plan.folder) as place:
        try:
            if adapter is None or not request.adapter_only:
                _say(f"loading {reference.base}{plan.in_dtype}, and merging" if adapter else "loading")
                check = write_whole_model(lambda: load_policy(reference, plan.config), place, request.shard_size)
            else:
                for file in (adapter / ADAPTER_CONFIG, *adapter.glob("adapter_model*.safetensors*")):
                    shutil.copyfile(file, place / file.name)
                if (adapter / "tokenizer_config.json").is_file():
                    load_tokenizer(plan.config, str(adapter)).save_pretrained(place)
            run = None if reference.run is None or reference.kind == "checkpoint" else RunFolder(reference.run)
            if run is None or not run.result.exists() or try_to_write_card(run, place) is not None:
                step = f" after step {reference.step}" if reference.step is not None else ""
                kind = "a LoRA adapter" if request.adapter_only else "one whole model"
                base = public_base(reference.base)
                text = f"{reference.label}: {base}, trained with GRPO by aitrain{step}, as {kind}."
                write_short_card(place, reference.label, reference.base, text)
        except (OSError, SafetensorError) as error:
            why = " ".join(str(error).split())[:200]
            raise RunFailed(f"Cannot write {plan.folder}: {why}\nFree some disk space, or choose --out.") from error
    return check


def _files(folder: Path) -> dict[str, int]:
    """The files of an export with their sizes; hidden ones and those of a trainer are left out."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}
    return {
        name: size
        for name, size in names.items()
        if not any(part.startswith(".") for part in name.split("/")) and Path(name).name not in NOT_UPLOADED
    }


def _convert_to_gguf(folder: Path, file: Path) -> None:
    """Convert a folder with llama.cpp's script, in the folder that LLAMA_CPP names or on the PATH.

    Raises:
        RunFailed: the converter is not installed, with the commands that do it, or it failed.
    """
    places: list[Path] = []
    if given := os.environ.get(VARIABLE):
        places += [Path(given).expanduser() / SCRIPT, Path(given).expanduser()]
    if on_path := shutil.which(SCRIPT) or shutil.which(SCRIPT.removesuffix(".py")):
        places.append(Path(on_path))
    saved = read_object(folder / "config.json")
    more = ["--outtype", GGUF_TYPES.get(str(saved.get("dtype")), "auto")]
    shown = shlex.join([str(folder), "--outfile", str(file), *more])
    script = next((place for place in places if place.is_file()), None)
    if script is None:
        raise RunFailed(
            "GGUF needs llama.cpp's converter, which is not installed here:\n"
            "  git clone --depth 1 https://github.com/ggml-org/llama.cpp\n"
            "  python -m pip install -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt\n"
            f"  python llama.cpp/{SCRIPT} {shown}"
        )
    with tempfile.TemporaryDirectory(prefix=STAGING, dir=file.parent) as hidden:
        partial = Path(hidden) / file.name
        command = [sys.executable, str(script), str(folder), "--outfile", str(partial), *more]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode or not partial.exists():
            lines = [line.strip()[:200] for line in done.stdout.splitlines() if line.strip()]
            last = lines[-1] if lines else f"exit code {done.returncode}"
            again = f"python {shlex.quote(str(script))} {shown}"
            raise RunFailed(
                f"llama.cpp's converter failed: {last}\nThe export is in {folder}. The command was:\n{again}"
            )
        partial.replace(file)


def _say(text: str) -> None:
    print(f"{escape_controls(text)} ...", file=sys.stderr, flush=True)


def _size(count: int) -> str:
    for unit, amount in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= amount:
            return f"{count / amount:.1f} {unit}"
    return f"{count} B"


if __name__ == "__main__":
    sys.exit(main(ExportRequest(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
