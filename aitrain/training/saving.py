"""The result of a run, as files: model or adapter, merged weights."""

from __future__ import annotations

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from aitrain.checkpoint import STAGING, publish
from aitrain.options.train import TrainConfig
from aitrain.run_folder import RunFolder
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
