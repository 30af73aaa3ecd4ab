"""Weights of a model: what this process holds of tensors that FSDP2 has sharded, the whole of them, and those that vLLM
loads, to which a LoRA adapter is added without changing them."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the parts of all processes. Every process must call this for a sharded one."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a sharded tensor, which may be empty; another one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP2 has sharded the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(model: torch.nn.Module) -> None:
    """Free gathered weights. After a forward pass without gradients the parameters of some modules are plain tensors,
    in the type of the computation; afterwards all are the sharded ones that the optimizer changes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered(
    tensors: Iterable[tuple[str, torch.Tensor]], keeps: bool, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """The whole tensors on the CPU, gathered one by one; none of them for a process that does not keep them. Every
    process must call this for sharded ones. `dtype` converts them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if keeps or isinstance(tensor, DTensor):
            full = whole(tensor.detach())
            if keeps:
                found[name] = full.to("cpu", dtype or full.dtype)
    return found


@torch.no_grad()
def merged_weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all weights, with the base's names; shared ones once, those with an adapter merged.

    The base is not written, as merging and unmerging in place accumulates rounding errors. Weights of a sharded model
    are sharded, and every process must iterate over them, as sums with an adapter are computed by all.
    """
    reshard(model)
    if not isinstance(model, PeftModel):
        yield from model.named_parameters()
        return
    base = model.get_base_model()
    layers = {name: module for name, module in base.named_modules() if isinstance(module, LoraLayer)}
    for name, parameter in base.named_parameters():
        if model.prefix in name or ".original_module." in name:
            continue
        owner, _, last = name.partition(".base_layer.")
        delta = _delta(layers[owner]) if last == "weight" and owner in layers else None
        full = parameter if delta is None else (parameter + delta).to(parameter.dtype)
        yield name.replace(".base_layer.", ".").replace(".modules_to_save.default.", "."), full.detach()


def _delta(layer: Any) -> torch.Tensor | None:
    """Sum of the active adapters' updates of a layer's weight, in its shape; None if there is none."""
    known = [name for name in layer.active_adapters if name in layer.lora_A or name in layer.lora_embedding_A]
    deltas = [layer.get_delta_weight(name) for name in known]
    return torch.stack(deltas).sum(dim=0) if deltas else None
