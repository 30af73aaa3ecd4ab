"""Progress of a training, by which the watchdog tells a run that hangs from a slow one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aitrain import activity
from aitrain.engines.colocated import counting_steps
from aitrain.training.model import count_forward_passes
from tests.training.conftest import random_adapter


def test_a_token_of_a_colocated_engine_is_progress() -> None:
    step = counting_steps(list)
    before = activity.own.slot.count
    assert step() == []
    assert activity.own.slot.count == before + 1


@pytest.mark.parametrize("has_adapter", [False, True])
def test_each_token_of_generate_and_each_forward_pass_are_progress(has_adapter: bool, small_model: Path) -> None:
    model: Any = (random_adapter if has_adapter else AutoModelForCausalLM.from_pretrained)(small_model)
    count_forward_passes(model)
    ids, before = torch.tensor([[5, 6, 7]]), activity.own.slot.count

    model.generate(input_ids=ids, max_new_tokens=8, min_new_tokens=8)
    assert activity.own.slot.count == before + 8
    model(input_ids=ids)
    assert activity.own.slot.count == before + 9
