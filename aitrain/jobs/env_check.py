"""The process of `aitrain env check`, started as ui/output.py says, see workbench/check/process.py."""

from functools import cached_property
from typing import Any

from aitrain.options.train import TrainConfig
from aitrain.workbench.check.process import Message
from aitrain.workbench.check.registry import answer


class LazyTokenizer:
    """The `tokenizer` argument of an environment: loaded when it is used, as most environments only take it."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config

    @property
    def is_loaded(self) -> bool:
        """Whether it was used."""
        return "_loaded" in self.__dict__

    @cached_property
    def _loaded(self) -> Any:
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


def main(request: Message) -> int:
    """Run the checks of the request; returns the exit code."""
    answer(request, LazyTokenizer)
    return 0
