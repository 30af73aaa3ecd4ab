"""Tensors of a model that FSDP2 has sharded: what this process holds of them, and the whole of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
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
