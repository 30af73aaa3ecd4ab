"""Saves the trained model or adapter, and the merged weights."""

from __future__ import annotations

import torch
from peft import PeftModel

from aitrain.engines.scopes import savable_generation_config
from aitrain.options.train import TrainConfig
from aitrain.runs.checkpoint import STAGING, publish
from aitrain.runs.run_folder import RunFolder
from aitrain.training.merging import merged
from aitrain.training.model import load_model
from aitrain.training.trainer import EpisodeTrainer


def save_model(trainer: EpisodeTrainer, folder: RunFolder) -> None:
    """Write model/ atomically; every process must call this."""
    partial = folder.path / f"{STAGING}model"
    trainer.model.config.use_cache = True  # the trainer disables it; users of the saved model need it
    with savable_generation_config(trainer.model):
        trainer.save_model(str(partial))
    if trainer.accelerator.is_main_process:
        (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle that nothing reads
        publish(partial, folder.model)
    trainer.accelerator.wait_for_everyone()


def merge_adapter(trainer: EpisodeTrainer, folder: RunFolder, config: TrainConfig, dtype: torch.dtype) -> None:
    """Write model/merged atomically: base plus adapter in the dtype of training, with the tokenizer.

    Loads the base a second time, on the CPU: the weights in use stay unchanged, and a quantized base is merged in full
    precision. Only one process may call this.
    """
    base = load_model(config.model_copy(update={"quantization": None}), dtype)
    whole = merged(PeftModel.from_pretrained(base, str(folder.model), use_safetensors=True))
    partial = folder.path / f"{STAGING}merged"
    with savable_generation_config(whole):
        whole.save_pretrained(partial)
    trainer.processing_class.save_pretrained(partial)
    publish(partial, folder.model / "merged")
