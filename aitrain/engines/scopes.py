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
    """Context in which garbage collections skip the objects that existed before it.

    Concurrent episodes cause many collections; scanning torch and transformers each time takes as long as the episodes.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Disable dropout and gradients in this context."""
    with kept_mode(model), torch.no_grad():
        model.eval()
        yield


@contextmanager
def kept_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put the model back into training or evaluation mode afterwards."""
    was_training = model.training
    try:
        yield
    finally:
        model.train(was_training)
