"""Models that are loaded to be played: base and adapter, tokenizer, what ends a completion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.runs.model_reference import read_model
from aitrain.training.policy_loader import load_policy

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def adapter(small_model: Path, tmp_path: Path) -> Path:
    """An adapter that changes what the model says, with a tokenizer of its own."""
    torch.manual_seed(0)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(small_model), LoraConfig(r=2, target_modules="all-linear")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    tokenizer.chat_template = "of the adapter"
    tokenizer.save_pretrained(tmp_path / "adapter")
    torch.save(model(IDS).logits, tmp_path / "logits.pt")
    return tmp_path / "adapter"


def test_an_adapter_is_played_on_its_base_with_its_own_tokenizer(adapter: Path, small_model: Path) -> None:
    policy = load_policy(read_model(str(adapter)), TrainConfig())
    with torch.no_grad():
        found, base = (
            policy.model(IDS).logits,
            load_policy(read_model(str(small_model)), TrainConfig()).model(IDS).logits,
        )
    wanted = torch.load(adapter.parent / "logits.pt", weights_only=True)
    assert torch.equal(found, wanted)
    assert not torch.allclose(found, base)
    assert policy.tokenizer.chat_template == "of the adapter"
    assert not policy.model.training


def test_without_weights_it_has_the_same_limits_and_ends(small_model: Path) -> None:
    reference = read_model(str(small_model))
    whole, shape = load_policy(reference, TrainConfig()), load_policy(reference, TrainConfig(), with_weights=False)
    assert shape.model.device.type == "meta"
    assert (shape.context, shape.end.eos_ids) == (whole.context, whole.end.eos_ids)


def test_a_damaged_adapter_is_named(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"cannot load the adapter .*adapter:"):
        load_policy(read_model(str(adapter)), TrainConfig())
