"""What holds for a while and is then as before: other values of attributes, and a model's evaluation mode."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced(owner: Any, attributes: dict[str, Any]) -> Iterator[None]:
    """Other values for some attributes, while this lasts."""
    before = {name: getattr(owner, name) for name in attributes}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        vars(owner).update(before)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Garbage collections leave out what exists now: many episodes at a time cause many of them, and to look at all of
    torch and transformers each time takes as long as the episodes themselves."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """No dropout, no gradients; afterwards as before."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
