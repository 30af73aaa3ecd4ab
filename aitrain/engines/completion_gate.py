"""Holds completions back while an engine gets other weights."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class CompletionGate:
    """Counts the completions in flight of one process. While it is closed there are none, and further ones wait."""

    _in_flight: int = field(default=0, init=False)
    _is_open: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _is_empty: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        self._is_open.set()
        self._is_empty.set()

    async def run(self, completion: Coroutine[Any, Any, T]) -> T:
        """The result of a completion, which begins when the gate is open."""
        try:
            await self._is_open.wait()
        except BaseException:
            completion.close()
            raise
        self._in_flight += 1
        self._is_empty.clear()
        try:
            return await completion
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._is_empty.set()

    async def close(self) -> None:
        """Hold further completions back, and wait for those in flight."""
        self._is_open.clear()
        await self._is_empty.wait()

    async def open(self) -> None:
        """Let the completions that wait begin."""
        self._is_open.set()
