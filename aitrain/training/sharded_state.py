"""Weights and optimizer state of a model that FSDP2 has sharded: gathered for files that any backend reads, or written
by all processes, each its part.

    model.safetensors, or adapter_model.safetensors     all weights, as without sharding
    optimizer.pt                                        likewise
    weights/, moments/                                  for sharded checkpoints in their place: one file of safetensors
                                                        for each process, read by any number of processes.
                                                        optimizer.pt has the rest of the optimizer's state then

torch's own format of sharded checkpoints has a pickle in it, and is not used.

Inside API of torch 2.13 and transformers 5.17 that it uses (tests/training/test_upstream.py):

    torch.distributed.checkpoint.HuggingFaceStorageWriter, HuggingFaceStorageReader     write and read such files
    torch.distributed.tensor.distribute_tensor(src_data_rank=None)      takes this process's part without communication
    transformers.modeling_utils.is_fsdp_enabled         replaced while a checkpoint's weights are converted
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import modeling_utils

from aitrain.engines.scopes import replaced
from aitrain.engines.sharded_tensors import gathered, reshard
from aitrain.runs.checkpoint import SHARDS

MOMENTS = "moments"
OPTIMIZER = "optimizer.pt"


def own_weights(model: Any) -> dict[str, torch.Tensor]:
    """The `saved_weights` of a model that FSDP2 has sharded."""
    reshard(model)
    return {name: tensor.detach() for name, tensor in saved_weights(model).items()}


def saved_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights that are saved, by their names in the model, not copied: tied ones once, and only
    the adapter of a model with one."""
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(model, PeftModel) or model.prefix in name:  # peft changes requires_grad for a reference pass
            tensors.setdefault(id(tensor), (name, tensor))
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
    if (checkpoint / SHARDS).is_dir():
        load(dict(weights), storage_reader=HuggingFaceStorageReader(str(checkpoint / SHARDS)))
        return
    for name, full in weights_in(checkpoint, model, weights.keys()):
        _fill(weights[name], full)


def weights_in(checkpoint: Path, model: Any, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights with these names in the model that a checkpoint has, in an order that is the same in all processes.

    Raises:
        KeyError: the checkpoint lacks one.
    """
    kind, found = "adapter_model" if isinstance(model, PeftModel) else "model", dict[str, Path]()
    for file in sorted(checkpoint.glob(f"{kind}*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: file for name in sorted(opened.keys()) if name in names}
    missing = names - found.keys()
    if not missing:
        for file in dict.fromkeys(found.values()):
            with safe_open(file, "pt") as opened:
                yield from ((name, opened.get_tensor(name)) for name in found if found[name] == file)
        return
    converted = {} if isinstance(model, PeftModel) else _converted(checkpoint, model)
    if unknown := names - converted.keys():
        raise KeyError(f"{checkpoint} has no {min(unknown)}")
    yield from ((name, converted[name]) for name in sorted(names))


def _converted(checkpoint: Path, model: Any) -> dict[str, torch.Tensor]:
    """A checkpoint's weights by their names in the model where transformers writes other ones: each expert of a mixture
    has a weight of its own in the files, and a part of one in memory."""
    kind: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with replaced(modeling_utils, {"is_fsdp_enabled": lambda: False}):  # else all but one process would get zeros
        written = kind.from_pretrained(checkpoint, config=copy.deepcopy(model.config), dtype=model.dtype)
    tensors: dict[str, torch.Tensor] = written.state_dict()
    return tensors


def _fill(target: torch.Tensor, full: torch.Tensor) -> None:
    target.copy_(_like(target, full))


def _like(target: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """A whole tensor, sharded as the target is: this process keeps its part."""
    if not isinstance(target, DTensor):
        return full
    full = full.to(target.device)
    sharded: torch.Tensor = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
    return sharded


# -- the optimizer


def write_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Path, is_main: bool, shards: bool) -> None:
    """Write the state of an optimizer. Every process must call this."""
    state = optimizer.state_dict()
    moments = dict(_moments(state["state"]))
    if shards:
        write_shards(moments, checkpoint / MOMENTS)
    values = dict.fromkeys(moments) if shards else gathered(moments.items(), is_main)
    if is_main:
        written = {
            number: {name: values.get(f"{number}.{name}", value) for name, value in named.items()}
            for number, named in state["state"].items()
        }
        torch.save(state | {"state": written}, checkpoint / OPTIMIZER)


def read_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Restore what `write_optimizer` wrote, or a run without sharding. Every process must call this."""
    state = torch.load(checkpoint / OPTIMIZER, map_location="cpu", mmap=True, weights_only=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments: dict[str, torch.Tensor] = {}
    for number, values in state["state"].items():
        for name, value in values.items():
            if value is None:
                values[name] = moments[f"{number}.{name}"] = torch.zeros_like(parameters[number].detach())
            elif value.shape == parameters[number].shape:
                values[name] = _like(parameters[number], value).clone()  # not the memory of the file
    if moments:
        load(dict(moments), storage_reader=HuggingFaceStorageReader(str(checkpoint / MOMENTS)))
    optimizer.load_state_dict(state)


def _moments(state: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The sharded values of an optimizer's state, by number of the weight and name."""
    for number, values in state.items():
        for name, value in values.items():
            if isinstance(value, DTensor):
                yield f"{number}.{name}", value


def write_shards(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write this process's parts into a file of its own. Every process must call this.

    Raises:
        Exception: that of the first process that could not write, on all of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:  # a BaseException, with what each process raised
        (first, _), *_ = error.failures.values()
        raise first from error
