"""Reads the shape of a model from config.json and the headers of its safetensors files, without loading it."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from aitrain.named_models import named_folder
from aitrain.runs.run_folder import read_object

SMALL = 2_000_000
"""Weights below which a model has one thread on the CPU."""
HEADER = 100 << 20
"""Maximum bytes of a header; a file with a larger one is damaged."""


@dataclass(frozen=True)
class Linear:
    """A weight matrix inside the layers, to which LoRA can be applied."""

    name: str
    """Name of its module: `q_proj`."""
    sides: int
    """Inputs plus outputs."""
    weights: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model: numbers of weights, of layers, of values for one token."""

    weights: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    linears: tuple[Linear, ...]

    @property
    def inside(self) -> int:
        """Number of weights in the matrices inside the layers."""
        return sum(linear.weights for linear in self.linears)

    def __str__(self) -> str:
        return (
            f"{self.weights / 1e6:,.1f} million weights: {self.layers} layers of {self.hidden},"
            f" {self.vocabulary:,} tokens"
        )


def read_model_shape(model: str) -> ModelShape | None:
    """Shape of a model in a folder or in the Hub's cache; None if it cannot be read. Sizes have other names in
    config.json by architecture."""
    folder = folder_of(model)
    if folder is None:
        return None
    config, tensors = read_object(folder / "config.json"), _tensors(folder)
    config = config.get("text_config") or config

    def size(*names: str, usual: int = 0) -> int:
        given = (config.get(name) for name in names)
        return next((value for value in given if isinstance(value, int) and value > 0), usual)

    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head", "num_heads")
    layers, vocabulary = size("num_hidden_layers", "n_layer", "num_layers"), size("vocab_size")
    if not (layers and hidden and heads and vocabulary and tensors):
        return None
    intermediate = size("intermediate_size", "n_inner", "ffn_dim", usual=4 * hidden)
    kv_heads = size("num_key_value_heads", usual=heads)
    head_dim = size("head_dim", usual=max(1, hidden // heads))
    linears = []
    for name, shape in tensors.items():  # those of layers have the layer's number in their name
        parts = name.split(".")
        if len(shape) == 2 and parts[-1] == "weight" and any(part.isdigit() for part in parts):
            linears.append(Linear(parts[-2], sum(shape), math.prod(shape)))
    weights = sum(map(math.prod, tensors.values()))
    return ModelShape(
        weights, layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary, linears=tuple(linears)
    )


def is_small(model: str) -> bool:
    """Whether one thread on the CPU is best for the model; False if its size is unknown.

    More threads spin while they wait for each other, which takes several times as long on cores that others use too.
    """
    shape = read_model_shape(model)
    return shape is not None and shape.weights < SMALL


def folder_of(model: str) -> Path | None:
    """Folder of a model's files on this machine, or its snapshot in the Hub's cache; None if there is none."""
    folder = named_folder(model) or Path(os.path.expanduser(model))
    if os.path.isfile(folder / "config.json"):
        return folder
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")))
    repository = cache / f"models--{model.replace('/', '--')}"
    try:
        commit = (repository / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    folder = repository / "snapshots" / commit
    return folder if (folder / "config.json").is_file() else None


def _tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by its name; empty if a file is missing or damaged."""
    index = read_object(folder / "model.safetensors.index.json").get("weight_map")
    files = sorted(set(index.values())) if isinstance(index, dict) else ["model.safetensors"]
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:  # a file begins with eight bytes, the length of the JSON that follows
            with (folder / str(file)).open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                if length > HEADER:
                    return {}
                header = json.loads(opened.read(length))
            shapes |= {name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
    return shapes
