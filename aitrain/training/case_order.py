"""The order of the training cases: which groups each generation batch has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch


class CaseOrder(Protocol):
    """Chooses the cases of generation batches. All ranks ask for the same batches, in the same order, and get the same
    answers."""

    def batch(self, index: int) -> list[int]:
        """The case number of each group of generation batch `index`, counted from the beginning of the run."""
        ...


@dataclass
class UniformOrder:
    """Epochs as one stream of cases: each epoch has each case once, and a batch may hold the last cases of one epoch
    and the first of the next. The order is that of TRL's sampler if the cases fill whole batches."""

    cases: int
    """Cases of one epoch."""
    groups: int
    """Groups of one generation batch, over all ranks."""
    seed: int | None
    """Each epoch is shuffled with it; None: the order of the dataset."""
    _stream: Iterator[int] | None = field(default=None, init=False)
    _next: int = field(default=0, init=False)
    _last: list[int] = field(default_factory=list, init=False)

    def batch(self, index: int) -> list[int]:
        """Batches are computed in order; an earlier one than the last starts from the beginning."""
        if self._stream is None or index < self._next - 1:
            self._stream, self._next = self._cases(), 0
        while self._next <= index:
            self._last, self._next = list(islice(self._stream, self.groups)), self._next + 1
        return self._last

    def _cases(self) -> Iterator[int]:
        """Case numbers of epoch after epoch, endless."""
        generator = torch.Generator()
        if self.seed is not None:
            generator.manual_seed(self.seed)
        while True:
            if self.seed is None:
                yield from range(self.cases)
            else:
                yield from torch.randperm(self.cases, generator=generator).tolist()
