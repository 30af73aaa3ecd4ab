"""The shape of a model, without loading it: read from config.json and the headers of its safetensors files, or that of
a popular model, whose files need not be on this machine."""

import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from aitrain.packages import SMOLLM2, named_folder
from aitrain.runs.run_folder import read_object

SMALL = 2_000_000
"""Weights below which a model has one thread on the CPU."""
HEADER = 100 << 20
"""Maximum bytes of a header; a file with a larger one is damaged."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model: numbers of weights, of layers, of values for one token."""

    weights: int
    hidden: int
    intermediate: int
    """Of the MLP, or of all experts together that a token passes through."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 1
    used: int = 1
    """Experts that a token passes through."""

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the matrices of a layer, by the names of their modules in most models; without experts,
        which transformers has as one matrix, to which no adapter is applied."""
        hidden, query, key = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        mlp = ("gate_proj", "up_proj", "down_proj") if self.experts == 1 else ()
        matrices = {"q_proj": (hidden, query), "o_proj": (query, hidden)}
        matrices |= dict.fromkeys(("k_proj", "v_proj"), (hidden, key))
        return matrices | dict.fromkeys(mlp, (hidden, self.intermediate))

    @property
    def expert_weights(self) -> int:
        """Number of weights in the experts of all layers."""
        of_used = 3 * self.hidden * self.intermediate * self.layers
        return of_used * self.experts // self.used if self.experts > 1 else 0

    @property
    def idle(self) -> int:
        """Weights of experts that a token does not pass through."""
        return self.expert_weights * (self.experts - self.used) // self.experts

    @property
    def inside(self) -> int:
        """Number of weights in the matrices inside the layers."""
        return self.layers * sum(a * b for a, b in self.matrices.values()) + self.expert_weights

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
    whole, tensors = read_object(folder / "config.json"), _tensors(folder)
    config = whole.get("text_config") or whole
    is_quantized = bool(whole.get("quantization_config") or config.get("quantization_config"))
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)  # some files have it twice
    weights = sum(map(math.prod, tensors.values()))

    def size(*names: str, usual: int = 0) -> int:
        given = (config.get(name) for name in names)
        return next((value for value in given if isinstance(value, int) and value > 0), usual)

    hidden, heads = size("hidden_size", "n_embd", "d_model"), size("num_attention_heads", "n_head", "num_heads")
    layers, vocabulary = size("num_hidden_layers", "n_layer", "num_layers"), size("vocab_size")
    if not (layers and hidden and heads and vocabulary and weights) or is_quantized:
        return known_shape(model)  # the Hub's cache may have the tokenizer alone
    experts = size("num_experts", "num_local_experts", "n_routed_experts", usual=1)
    used, of_expert = (size("num_experts_per_tok", usual=1), "moe_intermediate_size") if experts > 1 else (1, "")
    intermediate = used * size(of_expert, "intermediate_size", "n_inner", "ffn_dim", usual=4 * hidden)
    kv_heads = size("num_key_value_heads", usual=heads)
    head_dim = size("head_dim", usual=max(1, hidden // heads))
    return ModelShape(weights, hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary, experts, used)


KNOWN: dict[str, tuple[int, ...]] = {
    # matrices of the vocabulary; hidden, intermediate, layers, heads, KV heads, size of a head, vocabulary
    "Qwen3-0.6B": (1, 1024, 3072, 28, 16, 8, 128, 151_936),
    "Qwen3-1.7B": (1, 2048, 6144, 28, 16, 8, 128, 151_936),
    "Qwen3-4B": (1, 2560, 9728, 36, 32, 8, 128, 151_936),
    "Qwen3-8B": (2, 4096, 12288, 36, 32, 8, 128, 151_936),
    "Qwen3-14B": (2, 5120, 17408, 40, 40, 8, 128, 151_936),
    "Qwen3-32B": (2, 5120, 25600, 64, 64, 8, 128, 151_936),
    "Qwen2.5-0.5B": (1, 896, 4864, 24, 14, 2, 64, 151_936),
    "Qwen2.5-1.5B": (1, 1536, 8960, 28, 12, 2, 128, 151_936),
    "Qwen2.5-3B": (1, 2048, 11008, 36, 16, 2, 128, 151_936),
    "Qwen2.5-7B": (2, 3584, 18944, 28, 28, 4, 128, 152_064),
    "Qwen2.5-72B": (2, 8192, 29568, 80, 64, 8, 128, 152_064),
    "Llama-3.2-1B": (1, 2048, 8192, 16, 32, 8, 64, 128_256),
    "Llama-3.2-3B": (1, 3072, 8192, 28, 24, 8, 128, 128_256),
    "Llama-3.1-8B": (2, 4096, 14336, 32, 32, 8, 128, 128_256),
    "gemma-3-1b": (1, 1152, 6912, 26, 4, 1, 256, 262_144),
    "gemma-3-4b": (1, 2560, 10240, 34, 8, 4, 256, 262_208),  # these three: the text part
    "gemma-3-12b": (1, 3840, 15360, 48, 16, 8, 256, 262_208),
    "gemma-3-27b": (1, 5376, 21504, 62, 32, 16, 128, 262_208),
    "SmolLM2-135M": (1, 576, 1536, 30, 9, 3, 64, 49_152),
    "SmolLM3-3B": (1, 2048, 11008, 36, 16, 4, 128, 128_256),
    "Mistral-7B": (2, 4096, 14336, 32, 32, 8, 128, 32_768),
    "gpt-oss-20b": (2, 2880, 11520, 24, 64, 8, 64, 201_088, 32, 4),  # with the number of experts, and of those in use
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
    matrices, *sizes = KNOWN[known]
    shape = ModelShape(0, *sizes)
    norms = 2 * shape.hidden * shape.layers
    return replace(shape, weights=shape.inside + norms + matrices * shape.vocabulary * shape.hidden)


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


def _tensors(folder: Path) -> dict[str, list[int]]:
    """Shape of every tensor by its name; empty if a file is missing or damaged. The Hub's library reads them as well,
    in 0.2 s more of each command."""
    index = read_object(folder / "model.safetensors.index.json").get("weight_map")
    shapes: dict[str, list[int]] = {}
    try:
        for file in set(index.values()) if isinstance(index, dict) else ["model.safetensors"]:
            with (folder / str(file)).open("rb") as opened:  # eight bytes, the length of the JSON that follows
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(min(length, HEADER)))
            shapes |= {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return shapes
