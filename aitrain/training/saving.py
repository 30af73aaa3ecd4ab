"""Saves the trained model or adapter of a run, and writes a trained model as one whole model.

Adapters are merged in memory, on a copy that was loaded for it: neither the base nor the adapter is changed.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from aitrain.engines.scopes import savable_generation_config
from aitrain.errors import RunFailed
from aitrain.options.train import TrainConfig
from aitrain.runs.checkpoint import STAGING, publish
from aitrain.runs.run_folder import RunFolder
from aitrain.training.model import LoadedPolicy, load_model

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer

PROBE = (2, 32)
"""Rows and tokens of the random input on which logits are compared."""
TOLERANCE = 1e-3
"""Largest difference of float32 logits to those of base plus adapter, relative to the largest logit."""


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


def merged(model: PeftModel) -> PreTrainedModel:
    """The base with the adapter added to its weights, which it changes.

    Tied embeddings are separated first if the adapter is on one of them: added to the weights of both, it would change
    the other one as well.
    """
    base = model.get_base_model()
    ends = [layer for layer in (base.get_input_embeddings(), base.get_output_embeddings()) if layer is not None]
    if len(ends) == 2 and ends[0].weight is ends[1].weight and any(isinstance(end, BaseTunerLayer) for end in ends):
        head = ends[1].get_base_layer() if isinstance(ends[1], BaseTunerLayer) else ends[1]
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied embeddings, and says that it changes the configuration
        whole: PreTrainedModel = model.merge_and_unload()
    return whole


def write_whole_model(load: Callable[[], LoadedPolicy], folder: Path, shard_size: str) -> LogitCheck:
    """Load a model, merge its adapter, if there is one, and write weights and tokenizer.

    Raises:
        RunFailed: the written model computes something else. Half precision rounds too much to tell.
    """
    policy = load()
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
        model.save_pretrained(folder, max_shard_size=shard_size)
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


# -- the model of a run


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
