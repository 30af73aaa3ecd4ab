"""Models of random weights, made on the spot, some in the shapes of real ones: what they say is noise, what they cost
is not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The numbers of a Qwen2 whose output layer is its embedding."""

    name: str
    layers: int
    hidden: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int = 259
    """259: the bytes and special tokens of the tiny model."""
    dtype: str = "float32"


REAL: dict[str, Any] = {"vocabulary": 151_936, "dtype": "bfloat16"}
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", layers=2, hidden=128, heads=4, key_heads=4, intermediate=256, dtype="bfloat16"),
        Shape("very small", layers=1, hidden=32, heads=1, key_heads=1, intermediate=96),
        Shape("10 million weights", layers=8, hidden=320, heads=5, key_heads=5, intermediate=864),
        Shape("8 layers of SmolLM2-135M", layers=8, hidden=576, heads=9, key_heads=3, intermediate=1536),
        Shape("0.5B", layers=24, hidden=896, heads=14, key_heads=2, intermediate=4864, **REAL),
        Shape("1.5B", layers=28, hidden=1536, heads=12, key_heads=2, intermediate=8960, **REAL),
        Shape("3B", layers=36, hidden=2048, heads=16, key_heads=2, intermediate=11_008, **REAL),
        Shape("4B", layers=36, hidden=2560, heads=32, key_heads=8, intermediate=9728, **REAL),
    )
}
"""`tiny` is the model that the package ships; the last four are Qwen2.5-0.5B, -1.5B and -3B, and nearly Qwen3-4B."""


def make_model(name: str, folder: Path) -> None:
    """Random weights in one of SHAPES, and the tiny model's tokenizer with more words.

    No answer ends before its most tokens where only the 50 most likely ones may be sampled (`rl_top_k=50`): the end
    token's logit is always 0, and theirs are not.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config
    from transformers.utils.logging import disable_progress_bar

    from tests.tiny_model import CONTEXT, build_tokenizer

    disable_progress_bar()
    torch.manual_seed(0)
    shape, tokenizer = SHAPES[name], build_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads,
        max_position_embeddings=2 * CONTEXT, tie_word_embeddings=True, **ends,
    )  # fmt: skip
    where = "cuda" if torch.cuda.is_available() else "cpu"  # billions of random numbers take minutes on a CPU
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype))
    model.generation_config = GenerationConfig(**ends)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.eos_token_id] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _add_words(folder / "tokenizer.json", shape.vocabulary)


def _add_words(file: Path, size: int) -> None:
    """So many tokens in all, so that whatever the model samples is a text; no text is encoded otherwise than before."""
    written = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = written["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in written["added_tokens"]}  # or they would move to the end
    vocabulary |= {f"word{number}": number for number in range(len(vocabulary), size)}
    file.write_text(json.dumps(written), encoding="utf-8")
