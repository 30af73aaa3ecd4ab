"""How FSDP2 shards a model, by its size, and what it cannot shard."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aitrain.options.train import TrainConfig

LARGE = 8_000_000_000
"""Weights above which one process neither loads a copy of its own nor gathers whole checkpoints."""
SMALL = 1_000_000_000
"""Weights below which gathered layers are kept from the forward to the backward pass."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop")
"""Optimizers that FSDP2 can shard: their state has one number, or several, for each weight, from the first step on.
That of adagrad exists before, for the weights that are replaced by sharded ones."""
SETTINGS = ("reshard_after_forward", "cpu_ram_efficient_loading", "state_dict_type", "transformer_layer_cls_to_wrap")
"""Keys of `--trl fsdp_config` that may be set."""


@dataclass(frozen=True)
class FSDPSettings:
    """The settings of accelerate's FSDP plugin that depend on the size of the model."""

    reshard_after_forward: bool
    """Free the gathered weights of a layer after its forward pass, and gather them once more for the backward pass."""
    cpu_ram_efficient_loading: bool
    """Only the first process of a machine reads the weights, and sends each process its part."""
    sharded_checkpoints: bool
    """Each process writes its part of a checkpoint; else the first one gathers and writes all of it."""

    def __str__(self) -> str:
        loaded = "read once per machine" if self.cpu_ram_efficient_loading else "read by each process"
        gathered = "twice" if self.reshard_after_forward else "once"
        saved = "by all processes, each its part" if self.sharded_checkpoints else "whole, by the first process"
        return f"weights {loaded}, each layer gathered {gathered} a pass, checkpoints written {saved}"


def fsdp_settings(config: TrainConfig, weights: int) -> FSDPSettings:
    """The settings for a model with this number of weights; `--trl fsdp_config` overrides them."""
    chosen = FSDPSettings(
        # peft switches an adapter off and on in the parameters that a module has then: the sharded or the gathered ones
        reshard_after_forward=weights >= SMALL or config.peft,
        cpu_ram_efficient_loading=weights >= SMALL,
        sharded_checkpoints=weights > LARGE and not config.peft,
    )
    given = config.trl_table("fsdp_config")
    state = str(given.get("state_dict_type", "")).upper()
    return FSDPSettings(
        bool(given.get("reshard_after_forward", chosen.reshard_after_forward)),
        bool(given.get("cpu_ram_efficient_loading", chosen.cpu_ram_efficient_loading)),
        state == "SHARDED_STATE_DICT" if state else chosen.sharded_checkpoints,
    )


def fsdp_rules(config: TrainConfig) -> Iterator[str]:
    """Options that FSDP2 does not go together with."""
    if config.distributed_backend != "fsdp2":
        return
    given = config.trl_table("fsdp_config")
    if config.quantization is not None:
        yield "quantization: quantized weights cannot be sharded with fsdp2\nLeave one of the two out."
    if config.optimizer not in OPTIMIZERS:
        yield f"optimizer: the state of {config.optimizer} cannot be sharded with fsdp2\nUse {', '.join(OPTIMIZERS)}."
    if config.peft and given.get("reshard_after_forward") is False:
        yield "trl: fsdp_config: with peft reshard_after_forward is always true\nLeave it out."
    if config.peft and str(given.get("state_dict_type", "")).upper() == "SHARDED_STATE_DICT":
        yield "trl: fsdp_config: with peft checkpoints have the adapter, whole\nLeave state_dict_type out."
    for key in given:
        if key not in SETTINGS:
            yield f"trl: fsdp_config: {key} is not for you to set\nWhat may be set is {', '.join(SETTINGS)}."
