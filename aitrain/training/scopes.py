"""Context managers that replace attributes, or put a model into evaluation mode, and restore them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


@contextmanager
def replaced(owner: object, attributes: Mapping[str, object]) -> Iterator[None]:
    """Replace instance attributes in this context."""
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
    """Disable dropout and gradients in this context."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
