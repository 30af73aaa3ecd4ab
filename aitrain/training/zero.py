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
import importlib.util
import pickle
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from transformers.integrations import deepspeed as integration

from aitrain.engines.scopes import replaced
from aitrain.errors import ConfigError, RunFailed
from aitrain.options.train import TrainConfig

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
    """Join DeepSpeed's process group. Every process must call this before a model is loaded.

    Raises:
        ConfigError: DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("distributed_backend: deepspeed is not installed\nInstall it with: pip install 'aitrain[deepspeed]'")
    deepspeed: Any = importlib.import_module("deepspeed")
    if use_cpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo" if use_cpu else None, timeout=timedelta(seconds=config.ddp_timeout), verbose=False)
