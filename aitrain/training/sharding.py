"""FSDP2, by accelerate: its settings, and the sharded model.

Inside API of accelerate 1.15, torch 2.13 and transformers 5.17 that it uses (tests/training/test_upstream.py):

    TrainingArguments.fsdp, .fsdp_config    make the FSDP plugin of the trainer's accelerator
    Accelerator.prepare(model, optimizer)   shards the model in place, and gives the optimizer its parameters; called
                                            when the trainer is made, and not once more by Trainer.train()
    AcceleratorState                        ignores the plugin on the CPU and in a single process
    fsdp_utils.fsdp2_prepare_model          shards a model without an optimizer, layer by layer
    ACCELERATE_USE_FSDP                     with it, transformers loads weights on the first process of a machine only;
                                            with it and others like it, accelerate distributes the model
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import parse_flag_from_env
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.fsdp import register_fsdp_forward_method
from trl import GRPOConfig

from aitrain.engines.sharded_tensors import is_sharded
from aitrain.errors import ConfigError
from aitrain.options.fsdp_settings import fsdp_settings
from aitrain.options.train import TrainConfig

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer

UNSHARDED_DEVICES: tuple[str, ...] = ("cpu",)
"""Types of devices on which accelerate ignores the FSDP plugin, without a word."""

VARIABLES = {
    "ACCELERATE_USE_FSDP": "fsdp2",
    "ACCELERATE_USE_DEEPSPEED": None,
    "ACCELERATE_USE_MEGATRON_LM": None,
    "ACCELERATE_USE_PARALLELISM_CONFIG": None,
}
"""Variables with which accelerate distributes the model in another way than the options say, and the backend that sets
them itself."""


# -- settings


def fsdp_arguments(config: TrainConfig, weights: int) -> dict[str, object]:
    """Arguments of GRPOConfig that shard a model with this number of weights."""
    settings = fsdp_settings(config, weights)
    chosen: dict[str, object] = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": settings.reshard_after_forward,
        "cpu_ram_efficient_loading": settings.cpu_ram_efficient_loading,
        "state_dict_type": "SHARDED_STATE_DICT" if settings.sharded_checkpoints else "FULL_STATE_DICT",
    }
    return {"fsdp": True, "fsdp_config": chosen | config.trl_table("fsdp_config")}


def check_can_shard(config: TrainConfig, device: str) -> None:
    """Refuse what accelerate would ignore.

    Raises:
        ConfigError: sharding is asked for in a way that would leave each process with the whole model.
    """
    for variable, backend in VARIABLES.items():
        if backend != config.distributed_backend and parse_flag_from_env(variable):
            instead = f", and use --distributed-backend {backend}" if backend else ""
            raise ConfigError(f"{variable}: aitrain does not take over accelerate's variables\nUnset it{instead}.")
    if config.distributed_backend == "fsdp2" and device in UNSHARDED_DEVICES:
        raise ConfigError(
            f"distributed_backend: accelerate ignores fsdp2 on the {device.upper()}: each process would hold the whole"
            " model\nUse --distributed-backend ddp, or a machine with GPUs."
        )


def check_sharded(config: TrainConfig, model: torch.nn.Module) -> None:
    """Check that a model is sharded if the options say so.

    Raises:
        ConfigError: it is not.
    """
    if config.distributed_backend == "fsdp2" and not is_sharded(model):
        raise ConfigError(
            "distributed_backend: fsdp2 is not active: accelerate left the whole model on each process\n"
            "It shards on several GPUs only. Use --distributed-backend ddp for what you have."
        )


# -- models


def load_once_per_machine(arguments: GRPOConfig) -> None:
    """Let transformers load weights on the first process of this machine only, if the settings say so."""
    if arguments.fsdp and arguments.fsdp_config["cpu_ram_efficient_loading"]:
        os.environ["ACCELERATE_USE_FSDP"] = "true"


def shard_now(trainer: EpisodeTrainer) -> None:
    """Shard the trainer's model and optimizer. Every process must call this.

    transformers does so when `train` is called. By then held-out cases have been scored, which a model that does not
    fit into one device cannot do.
    """
    plugin = trainer.accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:  # accelerate adds up the gradients of all processes in half precision
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)
    trainer.create_optimizer()
    trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
    trainer.model_wrapped = trainer.model
    register_fsdp_forward_method(trainer.model, "generate")


def prepare_reference(model: Any, accelerator: Accelerator) -> Any:
    """Shard the reference model layer by layer. TRL would gather all of it for each forward pass, and not send the
    weights to processes that have not loaded them."""
    return fsdp2_prepare_model(accelerator, model).eval()
