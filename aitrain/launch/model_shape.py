"""The shape of a model, without loading it: read from config.json and the headers of its safetensors files, or that of
a popular model, whose files need not be on this machine."""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aitrain.packages import SMOLLM2, named_folder
from aitrain.runs.run_folder import read_object

SMALL = 2_000_000
"""Weights below which a model has one thread on the CPU."""


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
    idle: int = 0
    """Weights of experts that a token does not pass through."""

    @property
    def inside(self) -> int:
        """Number of weights in the matrices inside the layers."""
        return sum(linear.weights for linear in self.linears)

    @property
    def cached_values(self) -> int:
        """Keys and values of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def __str__(self) -> str:
        return (
            f"{self.weights / 1e6:,.1f} million weights: {self.layers} layers of {self.hidden},"
            f" {self.vocabulary:,} tokens"
        )


def read_model_shape(model: str) -> ModelShape | None:
    """Shape of a model in a folder or in the Hub's cache, else of a known one; None if there is neither, or its weights
    are quantized. Sizes have other names in config.json by architecture."""
    folder = folder_of(model)
    if folder is None:
        return known_shape(model)
    from huggingface_hub import get_local_safetensors_metadata  # here and below, because commands need 0.2 s for it

    tensors = dict[str, list[int]]()
    with suppress(Exception):  # a file is missing or damaged
        for file in get_local_safetensors_metadata(folder).files_metadata.values():
            tensors |= {name: tensor.shape for name, tensor in file.tensors.items()}
    whole = read_object(folder / "config.json")
    config = whole.get("text_config") or whole
    is_quantized = bool(whole.get("quantization_config") or config.get("quantization_config"))
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)  # some files have it twice

    def size(*names: str, usual: int = 0) -> int:
        given = (config.get(name) for name in names)
        return next((value for value in given if isinstance(value, int) and value > 0), usual)

    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head", "num_heads")
    layers, vocabulary = size("num_hidden_layers", "n_layer", "num_layers"), size("vocab_size")
    if not (layers and hidden and heads and vocabulary and tensors) or is_quantized:
        return known_shape(model)  # the Hub's cache may have the tokenizer alone
    count = size("num_experts", "num_local_experts", "n_routed_experts", usual=1)
    used, of_expert = (size("num_experts_per_tok", usual=1), "moe_intermediate_size") if count > 1 else (1, "")
    intermediate = used * size(of_expert, "intermediate_size", "n_inner", "ffn_dim", usual=4 * hidden)
    kv_heads = size("num_key_value_heads", usual=heads)
    head_dim = size("head_dim", usual=max(1, hidden // heads))
    linears, experts = [], 0
    for name, shape in tensors.items():  # those of layers have the layer's number in their name
        parts = name.split(".")
        if len(shape) < 2 or not any(part.isdigit() for part in parts):
            continue
        if "experts" in parts or (count > 1 and len(shape) > 2):
            experts += math.prod(shape)
        elif parts[-1] == "weight":
            linears.append(Linear(parts[-2], sum(shape), math.prod(shape)))
    if experts:  # transformers has them as one matrix, to which no adapter is applied
        linears.append(Linear("experts", 0, experts))
    weights = sum(map(math.prod, tensors.values()))
    sizes = (layers, hidden, intermediate, heads, kv_heads, head_dim, vocabulary)
    return ModelShape(weights, *sizes, linears=tuple(linears), idle=experts * max(0, count - used) // count)


KNOWN: dict[str, tuple[int, ...]] = {
    # hidden, intermediate, layers, heads, KV heads, size of a head, vocabulary, 1 if head and embedding are one matrix
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, 128, 151_936, 1),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, 151_936, 1),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, 128, 151_936, 1),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, 128, 151_936, 0),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, 128, 151_936, 0),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, 128, 151_936, 0),
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 64, 151_936, 1),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 128, 151_936, 1),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 128, 151_936, 1),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 128, 152_064, 0),
    "Qwen2.5-72B": (8192, 29568, 80, 64, 8, 128, 152_064, 0),
    "Llama-3.2-1B": (2048, 8192, 16, 32, 8, 64, 128_256, 1),
    "Llama-3.2-3B": (3072, 8192, 28, 24, 8, 128, 128_256, 1),
    "Llama-3.1-8B": (4096, 14336, 32, 32, 8, 128, 128_256, 0),
    "gemma-3-1b": (1152, 6912, 26, 4, 1, 256, 262_144, 1),
    "gemma-3-4b": (2560, 10240, 34, 8, 4, 256, 262_208, 1),  # these three: the text part
    "gemma-3-12b": (3840, 15360, 48, 16, 8, 256, 262_208, 1),
    "gemma-3-27b": (5376, 21504, 62, 32, 16, 128, 262_208, 1),
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 64, 49_152, 1),
    "SmolLM3-3B": (2048, 11008, 36, 16, 4, 128, 128_256, 1),
    "Mistral-7B": (4096, 14336, 32, 32, 8, 128, 32_768, 0),
    "gpt-oss-20b": (2880, 2880, 24, 64, 8, 64, 201_088, 0, 32, 4),  # with the number of experts, and of those in use
}
"""Sizes of popular models, as their config.json has them, by the beginning of their names on the Hub."""

PACKED = re.compile("awq|gptq|gguf|fp8|mlx|[48]-?bit")
"""What the names of models with quantized weights have, whose files have other sizes."""


def known_shape(model: str) -> ModelShape | None:
    """Shape of a model in KNOWN by its name, whoever publishes it, and of variants such as `-Instruct-2507`, without
    biases; None for other models, and for quantized ones."""
    name = "SmolLM2-135M" if model == SMOLLM2 else model.rpartition("/")[2]
    name = re.sub("^meta-|-(math|coder)(?=-)", "", name.casefold())
    known = next((known for known in KNOWN if f"{name}-".startswith(f"{known.casefold()}-")), None)
    if known is None or PACKED.search(name):
        return None
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary, is_tied, *experts = KNOWN[known]
    count, used = experts or (1, 1)
    query, key, expert = heads * head_dim, kv_heads * head_dim, 3 * hidden * intermediate
    sides = {"q_proj": (hidden, query), "k_proj": (hidden, key), "v_proj": (hidden, key), "o_proj": (query, hidden)}
    if count == 1:
        sides |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (hidden, intermediate))
    layer = [Linear(name, a + b, a * b) for name, (a, b) in sides.items()]
    if count > 1:
        layer.append(Linear("experts", 0, count * expert))
    weights = layers * (sum(linear.weights for linear in layer) + 2 * hidden) + (2 - is_tied) * vocabulary * hidden
    sizes = (layers, hidden, used * intermediate, heads, kv_heads, head_dim, vocabulary)
    return ModelShape(weights, *sizes, linears=tuple(layer) * layers, idle=layers * (count - used) * expert)


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
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(model, "config.json")
    except ValueError:  # no name of the Hub
        return None
    return Path(file).parent if isinstance(file, str) else None
