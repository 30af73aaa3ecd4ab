"""What is handed to vLLM of a LoRA model: base plus adapter, and the base is never written."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from aitrain.engines.merged_weights import merged_weights


@pytest.fixture
def adapted(small_model: Path) -> torch.nn.Module:
    """The small model in bfloat16 with an adapter that changes it."""
    model = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.bfloat16)
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", lora_alpha=8))
    torch.manual_seed(0)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return peft_model


def test_what_is_handed_over_is_what_merging_gives(adapted: torch.nn.Module) -> None:
    handed = dict(merged_weights(adapted))
    merged = copy.deepcopy(adapted).merge_and_unload().state_dict()

    assert set(handed) <= set(merged)
    assert set(merged) - set(handed) <= {"lm_head.weight"}  # tied to the embedding
    assert all(torch.equal(handed[name], merged[name]) for name in handed)


def test_handing_over_a_hundred_times_leaves_every_weight_as_it_was(adapted: torch.nn.Module) -> None:
    before = copy.deepcopy(adapted.state_dict())
    for _ in range(100):
        for _ in merged_weights(adapted):
            pass

    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())


def test_merging_in_place_would_have_moved_the_base(adapted: torch.nn.Module) -> None:
    """The reason: what TRL does."""
    before = copy.deepcopy(adapted.state_dict())
    for _ in range(100):
        adapted.merge_adapter()
        adapted.unmerge_adapter()

    assert any(not torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
