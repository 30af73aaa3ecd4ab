"""Forward passes of a sharded model that the main process asks for, and in which all processes take part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.nn.utils.rnn import pad_sequence

from aitrain.engines.scopes import evaluation_mode

Rows = list[list[int]]


@dataclass
class SharedForward:
    """Computes logits of a model, which may be sharded."""

    model: Any
    is_main: bool = True
    """Whether this process asks for forward passes; the others follow it."""
    is_shared: bool = False
    """Whether all processes take part."""

    @contextmanager
    def led_by_main(self) -> Iterator[None]:
        """Context in which the main process may call `logits`; the others follow it at the context's end. Every process
        must enter it."""
        try:
            yield
        finally:
            if self.is_shared:
                if self.is_main:
                    broadcast_object_list([None])
                else:
                    self._follow()

    def logits(self, rows: Rows, with_adapter: bool = True) -> torch.Tensor:
        """The model's logits for rows of token ids, padded on the right, without dropout."""
        if self.is_shared:
            broadcast_object_list([(rows, with_adapter)])
        return self._compute(rows, with_adapter)

    def _follow(self) -> None:
        while True:
            asked: list[tuple[Rows, bool] | None] = [None]
            broadcast_object_list(asked)
            if asked[0] is None:
                return
            self._compute(*asked[0])

    def _compute(self, rows: Rows, with_adapter: bool) -> torch.Tensor:
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self.model.device)
        with evaluation_mode(self.model), nullcontext() if with_adapter else self.model.disable_adapter():
            logits: torch.Tensor = self.model(ids).logits  # causal attention: padding on the right has no effect
        return logits
