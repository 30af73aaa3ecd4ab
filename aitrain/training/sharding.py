"""FSDP2, by accelerate: its settings, the sharded model, and its files in a checkpoint. They are those of a run without
sharding: the first process writes weights and optimizer whole, and any backend reads them.

Inside API of accelerate 1.15, torch 2.13 and transformers 5.17 that it uses (tests/training/test_upstream.py):

    TrainingArguments.fsdp, .fsdp_config    make the FSDP plugin of the trainer's accelerator
    Accelerator.prepare(model, optimizer)   shards the model in place, and gives the optimizer its parameters; called
                                            when the trainer is made, and not once more by Trainer.train()
    AcceleratorState                        ignores the plugin on the CPU and in a single process
    fsdp_utils.fsdp2_prepare_model          shards a model without an optimizer, layer by layer
    ACCELERATE_USE_FSDP                     with it, transformers loads weights on the first process of a machine only
    torch.distributed.tensor.distribute_tensor(src_data_rank=None)      takes this process's part without communication
    transformers.modeling_utils.is_fsdp_enabled         replaced while a checkpoint's weights are converted
    transformers.trainer.save_fsdp_model, .save_fsdp_optimizer, .load_fsdp_optimizer    replaced from then on
"""

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import modeling_utils
from transformers import trainer as transformers_trainer
from trl import GRPOConfig, GRPOTrainer

from aitrain.engines.scopes import replaced
from aitrain.engines.sharded_tensors import gathered, reshard
from aitrain.errors import ConfigError
from aitrain.options.train import FSDP_SMALL, TrainConfig, reshards_after_forward

UNSHARDED_DEVICES: tuple[str, ...] = ("cpu",)
"""Types of devices on which accelerate ignores the FSDP plugin, without a word."""


# -- settings


def fsdp_arguments(config: TrainConfig, weights: int) -> dict[str, object]:
    """Arguments of GRPOConfig that shard a model with this number of weights."""
    chosen = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": reshards_after_forward(config, weights),
        "cpu_ram_efficient_loading": weights >= FSDP_SMALL,
        "state_dict_type": "FULL_STATE_DICT",
    }
    return {"fsdp": True, "fsdp_config": chosen}


def refuse_unsharded(config: TrainConfig, device: str, is_whole: bool = False) -> None:
    """Refuse fsdp2 where accelerate ignores it: on this type of device, or as the model is whole in spite of it.

    Raises:
        ConfigError: each process would hold the whole model.
    """
    if config.distributed_backend == "fsdp2" and (is_whole or device in UNSHARDED_DEVICES):
        raise ConfigError(
            "distributed_backend: accelerate ignores fsdp2, which needs several GPUs: each process would hold the whole"
            " model\nUse --distributed-backend ddp, or several GPUs."
        )


# -- models


def load_once_per_machine(arguments: GRPOConfig) -> None:
    """Let transformers load weights on the first process of this machine only, if the settings say so."""
    if arguments.fsdp and arguments.fsdp_config["cpu_ram_efficient_loading"]:
        os.environ["ACCELERATE_USE_FSDP"] = "true"


def shard_now(trainer: GRPOTrainer) -> None:
    """Shard the trainer's model and optimizer, and have transformers write and read its state here. Every process must
    call this.

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
    vars(transformers_trainer).update(
        save_fsdp_model=lambda *_, **__: None,  # the trainer's save_model writes the weights
        save_fsdp_optimizer=_write_optimizer,
        load_fsdp_optimizer=_read_optimizer,
    )


def prepare_reference(model: Any, accelerator: Accelerator) -> Any:
    """Shard the reference model layer by layer. TRL would gather all of it for each forward pass, and not send the
    weights to processes that have not loaded them."""
    return fsdp2_prepare_model(accelerator, model).eval()


# -- weights in a checkpoint

OPTIMIZER = "optimizer.pt"


def own_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights that are saved, by their names in the model, not copied: tied ones once, and only the adapter of a
    model with one. Of a sharded model, this process's part of each."""
    reshard(model)
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(model, PeftModel) or model.prefix in name:  # peft changes requires_grad for a reference pass
            tensors.setdefault(id(tensor), (name, tensor.detach()))
    return dict(tensors.values())


def load_weights(model: Any, checkpoint: Path) -> None:
    """Load the weights of a checkpoint into a model, of which each process has a part or all. Every process must call
    this.

    Raises:
        KeyError: the checkpoint lacks a weight.
    """
    weights = own_weights(model)
    if isinstance(model, PeftModel):
        weights = get_peft_model_state_dict(model, weights, save_embedding_layers=False)
    kind, missing = "adapter_model" if isinstance(model, PeftModel) else "model", set(weights)
    for file in sorted(checkpoint.glob(f"{kind}*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in missing & set(opened.keys()):
                weights[name].copy_(_like(weights[name], opened.get_tensor(name)))
                missing.remove(name)
    converted = _converted(checkpoint, model) if missing and not isinstance(model, PeftModel) else {}
    if unknown := missing - converted.keys():
        raise KeyError(f"{checkpoint} has no {min(unknown)}")
    for name in missing:
        weights[name].copy_(_like(weights[name], converted[name]))


def _converted(checkpoint: Path, model: Any) -> dict[str, torch.Tensor]:
    """A checkpoint's weights by their names in the model where transformers writes other ones: each expert of a mixture
    has a weight of its own in the files, and a part of one in memory."""
    kind: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with replaced(modeling_utils, {"is_fsdp_enabled": lambda: False}):  # else all but one process would get zeros
        written = kind.from_pretrained(checkpoint, config=copy.deepcopy(model.config), dtype=model.dtype)
    tensors: dict[str, torch.Tensor] = written.state_dict()
    return tensors


def _like(target: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """A whole tensor, sharded as the target is: this process keeps its part."""
    if not isinstance(target, DTensor):
        return full
    full = full.to(target.device)
    sharded: torch.Tensor = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
    return sharded


# -- the optimizer


def _write_optimizer(_: Any, accelerator: Accelerator, optimizer: Any, model: Any, checkpoint: str) -> None:
    """Write the state of an optimizer, gathered. Every process must call this."""
    state, is_main = optimizer.state_dict(), accelerator.is_main_process
    state["state"] = {number: gathered(values.items(), is_main) for number, values in state["state"].items()}
    if is_main:
        torch.save(state, Path(checkpoint) / OPTIMIZER)


def _read_optimizer(
    _: Any, accelerator: Accelerator, optimizer: Any, model: Any, checkpoint: str, **options: Any
) -> None:
    """Restore what `_write_optimizer` wrote, or a run without sharding. Every process must call this."""
    state = torch.load(Path(checkpoint) / OPTIMIZER, map_location="cpu", mmap=True, weights_only=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state["state"].items():
        for name, value in values.items():
            if value.shape == parameters[number].shape:
                values[name] = _like(parameters[number], value).clone()  # not the memory of the file
    optimizer.load_state_dict(state)
