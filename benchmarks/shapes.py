"""Models of random weights, made on the spot, some in the shapes of real ones: what they say is noise, what they cost
is not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """The numbers of a Qwen2 whose output layer is its embedding."""

    name: str
    layers: int
    hidden: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int = 151_936


TINY = Shape("tiny", layers=2, hidden=128, heads=4, key_heads=4, intermediate=256, vocabulary=259)
"""That of the model that the package ships."""

SMALL = Shape("26M", layers=8, hidden=512, heads=8, key_heads=2, intermediate=1376, vocabulary=8192)

QWEN_HALF_B = Shape("0.5B", layers=24, hidden=896, heads=14, key_heads=2, intermediate=4864)
QWEN_ONE_AND_A_HALF_B = Shape("1.5B", layers=28, hidden=1536, heads=12, key_heads=2, intermediate=8960)
QWEN_THREE_B = Shape("3B", layers=36, hidden=2048, heads=16, key_heads=2, intermediate=11_008)
"""Qwen2.5-0.5B, -1.5B and -3B."""


def make_model(shape: Shape, folder: Path) -> None:
    """Random weights in bfloat16, as such models come, and the tiny model's tokenizer with more words.

    No answer ends before its most tokens where only the 50 most likely ones may be sampled (`rl_top_k=50`): the end
    token's logit is always 0, and theirs are not.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config
    from transformers.utils.logging import disable_progress_bar

    from tests.tiny_model import CONTEXT, build_tokenizer

    disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, **ends,
    )  # fmt: skip
    where = "cuda" if torch.cuda.is_available() else "cpu"  # billions of random numbers take minutes on a CPU
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
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
