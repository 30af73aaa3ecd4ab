"""The weights that vLLM loads: the model's, to which a LoRA adapter is added without changing them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from aitrain.engines.sharded_tensors import reshard


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
