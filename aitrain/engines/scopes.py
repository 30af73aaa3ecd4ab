"""Context managers that replace attributes, or put a model into another state, and restore them; and the model inside
of peft's wrapper."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from transformers import TrainingArguments


def innermost(model: Any) -> Any:
    """The model itself, where peft wraps it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


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


def use_autocast(accelerator: Accelerator, model: Any) -> None:
    """Compute a model in the number format of a training, as accelerate does from `train` on; its `generate` converts
    the trained weights once, not for each token. It stays a method, as a model with a function there has no pickle."""
    accelerator.prepare_model(model, evaluation_mode=True)
    model.generate = MethodType(accelerator.autocast()(type(model).generate), model)


def use_device(device: torch.device) -> None:
    """Make a GPU that of this thread; each thread begins with the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Disable dropout and gradients in this context."""
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        model.train(was_training)


@contextmanager
def gradient_checkpointing(model: Any, arguments: TrainingArguments) -> Iterator[None]:
    """Checkpoint layers in this context, if the arguments of a training say so."""
    was_checkpointing = model.is_gradient_checkpointing
    if arguments.gradient_checkpointing and not was_checkpointing:
        given = arguments.gradient_checkpointing_kwargs or {}
        kept = {name: value for name, value in given.items() if name not in ("every_n_layers", "offload")}
        model.gradient_checkpointing_enable(kept or None)
    try:
        yield
    finally:
        if model.is_gradient_checkpointing and not was_checkpointing:
            model.gradient_checkpointing_disable()


@contextmanager
def savable_generation_config(model: torch.nn.Module) -> Iterator[None]:
    """Save a generation config that has a temperature but no sampling with sampling turned on.

    transformers loads such a config, but refuses to save the model that has it.
    """
    generation = innermost(model).generation_config
    before = generation.do_sample
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True
    try:
        yield
    finally:
        generation.do_sample = before
