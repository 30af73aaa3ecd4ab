"""Python's and numpy's global random numbers for games that draw from them, each game with a sequence of its own."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_LOCK = threading.RLock()
"""Held while a game draws: the global state is one for all threads of the process."""


class RandomStream:
    """The random numbers of one game."""

    def __init__(self, seed: int) -> None:
        self.python, self.numpy_seed = random.Random(seed).getstate(), seed % 2**32
        self.numpy: object = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block the global functions of `random` and `numpy.random` draw from this stream."""
        numpy = sys.modules.get("numpy.random")
        with _LOCK:
            python_before, numpy_before = random.getstate(), numpy and numpy.get_state()
            random.setstate(self.python)
            if numpy and self.numpy is None:
                numpy.seed(self.numpy_seed)
            elif numpy:
                numpy.set_state(self.numpy)
            try:
                yield
            finally:
                self.python, self.numpy = random.getstate(), numpy and numpy.get_state()
                random.setstate(python_before)
                if numpy:
                    numpy.set_state(numpy_before)
