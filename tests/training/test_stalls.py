"""Progress of a training, by which the watchdog tells a run that hangs from a slow one."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from aitrain import activity
from aitrain.engines.colocated import counting_steps
from aitrain.rollout import event_loop
from aitrain.training.model import count_forward_passes
from aitrain.training.policy_rollouts import PolicyRollouts
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


def test_rollouts_are_closed_while_their_loop_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook after Ctrl-C does not wait for the generation, which nothing else ends."""
    monkeypatch.setattr(event_loop, "CANCEL_SECONDS", 0.05)
    begun, over, is_closed, loop = threading.Event(), threading.Event(), threading.Event(), event_loop.ThreadLoop()
    rollouts: Any = SimpleNamespace(loop=loop, server=None, rollout=SimpleNamespace(engine=object()))

    async def generate() -> None:
        begun.set()
        over.wait()

    def play() -> None:
        with suppress(CancelledError):
            loop.run(generate())

    def close() -> None:
        PolicyRollouts.close(rollouts)
        is_closed.set()

    threading.Thread(target=play, daemon=True).start()
    begun.wait()
    threading.Thread(target=close, daemon=True).start()
    try:
        assert is_closed.wait(20)
    finally:
        over.set()
