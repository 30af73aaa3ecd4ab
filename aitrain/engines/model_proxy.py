"""The model that an environment is given: `generate` goes through a batcher; device, dtype and mode stay the
trainer's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

CallModel = Callable[[str, tuple[object, ...], dict[str, object]], Any]
"""`call(method, args, kwargs)` calls a method of the model, in the thread that may touch it."""


class ModelProxy:
    """Behaves like the model: `generate` and calls go through the batcher, in evaluation mode and without gradients;
    other attributes are read and set on the model itself.

    `to`, `eval`, `train` and the like do nothing.
    """

    __slots__ = ("_call", "_model")

    def __init__(self, call: CallModel, model: PreTrainedModel) -> None:
        object.__setattr__(self, "_call", call)
        object.__setattr__(self, "_model", model)

    def generate(self, *args: object, **kwargs: object) -> Any:
        """The model's `generate`, with the result of a separate call; it samples with the episode's seed."""
        return self._call("generate", args, kwargs)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The model's forward pass, without gradients."""
        return self._call("__call__", args, kwargs)

    forward = __call__

    def to(self, *args: object, **kwargs: object) -> ModelProxy:
        """Do nothing; returns the proxy."""
        return self

    eval = train = requires_grad_ = cuda = cpu = float = half = bfloat16 = to

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # so that it is an instance of the model's class
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._model, name, value)

    def __repr__(self) -> str:
        return repr(self._model)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError("the model that is being trained cannot be copied or pickled from inside an episode")
