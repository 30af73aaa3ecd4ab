"""The result of a run, as files: model or adapter, merged weights, model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from aitrain.checkpoint import STAGING, publish
from aitrain.config import TrainConfig
from aitrain.run_folder import RunFolder, write_text
from aitrain.training.model import load_model
from aitrain.training.trainer import EpisodeTrainer


def save_model(trainer: EpisodeTrainer, folder: RunFolder) -> None:
    """model/, whole or not at all; every process must call this."""
    partial = folder.path / f"{STAGING}model"
    trainer.model.config.use_cache = True  # the trainer switches it off, and whoever loads the model wants it
    trainer.save_model(str(partial))
    if trainer.accelerator.is_main_process:
        (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle, and of no use to anybody
        publish(partial, folder.model)
    trainer.accelerator.wait_for_everyone()


def merge_adapter(trainer: EpisodeTrainer, folder: RunFolder, config: TrainConfig, dtype: torch.dtype) -> None:
    """model/merged: base plus adapter, in the training's number format, with the tokenizer; whole or not at all.

    A fresh copy of the base is loaded on the CPU, so the weights that were trained against are not touched, and a
    quantized base is merged in full precision. For one process only.
    """
    base = load_model(config.model_copy(update={"quantization": None}), dtype)
    merged: PreTrainedModel = PeftModel.from_pretrained(
        base, str(folder.model), use_safetensors=True
    ).merge_and_unload()
    partial = folder.path / f"{STAGING}merged"
    merged.save_pretrained(partial)
    trainer.processing_class.save_pretrained(partial)
    publish(partial, folder.model / "merged")


def write_model_card(folder: RunFolder, config: TrainConfig, result: Mapping[str, Any]) -> None:
    """model/README.md: what was trained, on what, and what came of it."""
    front = ["---", "tags:", "- aitrain", "- grpo", "- trl"]
    if not Path(config.model).exists() and config.model != "tiny":
        front.append(f"base_model: {config.model}")
    if config.peft:
        front.append("library_name: peft")
    write_text(folder.model / "README.md", "\n".join([*front, "---", "", *_card_body(config, result)]) + "\n")


def _card_body(config: TrainConfig, result: Mapping[str, Any]) -> list[str]:
    return [
        f"# {config.project_name}",
        "",
        f"`{config.model}` trained with GRPO on the environment `{result['environment']}` by aitrain.",
        "",
        f"| held-out score ({result['eval_cases']} cases) | before | after |",
        "|---|---|---|",
        f"| sampled | {_score(result['score_before'])} | {_score(result['score_after'])} |",
        f"| greedy | {_score(result['greedy_before'])} | {_score(result['greedy_after'])} |",
        "",
        f"{result['steps']} steps, {result['seconds']:.0f} seconds, status: {result['status']}.",
        *(["", "The adapter lies here; `merged/` holds base and adapter as one model."] if _is_merged(config) else []),
    ]


def _is_merged(config: TrainConfig) -> bool:
    return config.peft and config.merge_adapter


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
