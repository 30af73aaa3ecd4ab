"""DeepSpeed's ZeRO: its configuration, its parameters, and how its checkpoints are read.

Inside API of DeepSpeed 0.19, transformers 5.17 and accelerate 1.15 that it uses (tests/training/test_upstream.py):

    deepspeed.init_distributed              called before a model is loaded: on the CPU, zero.Init takes the number of
                                            processes for 1 without it
    deepspeed.ops.__compatible_ops__        changed on the CPU: DeepSpeed would compile an operation that is for
                                            inference, which takes two minutes
    Parameter.ds_tensor, .ds_shape, .ds_numel       a process's part of a parameter under ZeRO-3, padded at the end, and
                                            the whole one's shape and size; .data is empty
    TorchCheckpointEngine.load              replaced while a checkpoint is loaded: it unpickles anything
    DeepSpeedEngine.optimizer.check_grad_overflow   set: steps with NaN or inf are skipped in float32 as well
    transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref       replaced: without it, a model is loaded
                                            whole by one process
"""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import PeftModel, get_peft_model_state_dict
from transformers.integrations import deepspeed as integration

from aitrain.engines.scopes import replaced
from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.training.sharded_state import saved_weights, weights_in

CHECKPOINT_ENGINE = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine"
CLASSES = (
    ("runtime.fp16.loss_scaler", "LossScaler"),
    ("runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("runtime.zero.config", "ZeroStageEnum"),
    ("utils.tensor_fragment", "fragment_address"),
)
"""Modules of DeepSpeed, and classes whose objects are in its checkpoints: plain data, whose loading runs no code."""

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_force_ds_cpu_optimizer": False,  # an optimizer of torch also works with offloaded state
}
"""What transformers fills in from the options of the run."""


def zero_arguments(config: TrainConfig) -> dict[str, object]:
    """Arguments of GRPOConfig that train with DeepSpeed."""
    table = copy.deepcopy(config.deepspeed_config) or {}
    given = table.get("zero_optimization", {})
    gathered = {"stage3_gather_16bit_weights_on_model_save": True}  # else there would be no model/
    zero = {"stage": config.zero_stage, **(given if isinstance(given, dict) else {}), **gathered}
    return {"deepspeed": {**table, **AUTO, "zero_optimization": zero}}


def start_deepspeed(config: TrainConfig, use_cpu: bool) -> None:
    """Join DeepSpeed's process group. Every process must call this before a model is loaded."""
    deepspeed: Any = importlib.import_module("deepspeed")
    if use_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    timeout = timedelta(seconds=config.ddp_timeout)
    deepspeed.init_distributed("gloo" if use_cpu else None, timeout=timeout, verbose=False)
    if not config.allow_pickle:
        importlib.import_module(CHECKPOINT_ENGINE).TorchCheckpointEngine.load = _load_own_classes_only


def check_active(config: TrainConfig, accelerator: Accelerator) -> None:
    """Check that DeepSpeed trains the model if the options say so.

    Raises:
        ConfigError: it does not.
    """
    if config.zero is not None and accelerator.distributed_type != DistributedType.DEEPSPEED:
        raise ConfigError(
            "distributed_backend: deepspeed is not active: accelerate left the whole model on each process\n"
            "Use --distributed-backend ddp for what you have."
        )


def skip_non_finite(engine: Any) -> None:
    """Let DeepSpeed skip steps whose gradients are NaN or inf; by itself it does so with fp16 only."""
    engine.optimizer.check_grad_overflow = True


# -- weights


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """This process's part of a parameter that ZeRO-3 has sharded, which may be empty; another one as it is."""
    part: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
    if part is None:
        return parameter
    left = parameter.ds_numel - part.numel() * torch.distributed.get_rank()  # type: ignore[attr-defined]
    return part[: max(0, min(part.numel(), left))]  # the rest is padding, which may hold anything


def gathered(model: Any, keeps: bool) -> dict[str, torch.Tensor]:
    """The weights that are saved, whole and on the CPU, gathered one by one; empty for a process that does not keep
    them. Every process must call this."""
    found = {}
    for name, tensor in saved_weights(model).items():
        with _whole(tensor):
            if keeps:
                found[name] = tensor.detach().cpu().clone()
    return found


def load_weights(model: Any, checkpoint: Path) -> None:
    """Load the weights of a checkpoint, after which the training cannot go on: the optimizer has its own copy. Every
    process must call this.

    Raises:
        KeyError: the checkpoint lacks a weight.
    """
    weights = saved_weights(model)
    if isinstance(model, PeftModel):
        weights = get_peft_model_state_dict(model, weights, save_embedding_layers=False)
    with loaded_whole(), torch.no_grad():
        for name, full in weights_in(checkpoint, model, weights.keys()):
            with _whole(weights[name], changed_by=0):
                if weights[name].numel():
                    weights[name].copy_(full)


def _whole(tensor: torch.Tensor, changed_by: int | None = None) -> AbstractContextManager[object]:
    """Gather a parameter in this context; with `changed_by`, what this rank makes of it is kept."""
    if not hasattr(tensor, "ds_tensor"):
        return nullcontext()
    zero = importlib.import_module("deepspeed").zero
    gathering: AbstractContextManager[object] = zero.GatheredParameters([tensor], modifier_rank=changed_by)
    return gathering


@contextmanager
def loaded_whole() -> Iterator[None]:
    """Load models whole and by one process in this context, also under ZeRO-3."""
    with replaced(integration, {"_hf_deepspeed_config_weak_ref": None}):
        yield


# -- checkpoints


def _load_own_classes_only(_: object, path: str, map_location: Any = None) -> Any:
    """Replaces DeepSpeed's own function, which unpickles anything.

    Raises:
        ConfigError: the file holds objects of other classes than DeepSpeed's.
    """
    classes = [getattr(importlib.import_module(f"deepspeed.{module}"), name) for module, name in CLASSES]
    try:
        with torch.serialization.safe_globals(classes):
            return torch.load(path, map_location=map_location, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"resume_from_checkpoint: {path} holds pickled objects that are not DeepSpeed's own: it was not loaded\n"
            "Add --allow-pickle only if you know who wrote it: loading it runs the code that is in it."
        ) from error
