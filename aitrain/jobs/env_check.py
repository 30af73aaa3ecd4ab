"""The process of `aitrain env check`: `python -m aitrain.jobs.env_check FILE`, see workbench/check/process.py."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import TYPE_CHECKING

from aitrain.options.train import TrainConfig
from aitrain.workbench.check.registry import main

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase


class LazyTokenizer:
    """The `tokenizer` argument of an environment: loaded when it is used, as most environments only take it."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    @property
    def is_loaded(self) -> bool:
        """Whether it was used."""
        return "_loaded" in self.__dict__

    @cached_property
    def _loaded(self) -> PreTrainedTokenizerBase:
        from aitrain.training.model import load_tokenizer

        return load_tokenizer(self._config)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loaded, name)

    def __call__(self, *arguments: object, **keywords: object) -> object:
        """The tokenizer's own call."""
        return self._loaded(*arguments, **keywords)

    def __len__(self) -> int:
        return len(self._loaded)

    def __reduce__(self) -> tuple[object, ...]:
        return copy.copy, (self._loaded,)  # worker processes get the tokenizer itself


if __name__ == "__main__":
    main(LazyTokenizer)
