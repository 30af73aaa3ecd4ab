"""One event loop for the rollouts of a process, run from code that is not async."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """Runs coroutines on one loop, so that connections stay usable from one rollout to the next.

    In a notebook the calling thread has a running loop already; there, another thread runs the coroutine.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result.

        Raises:
            BaseException: what the coroutine raises.
        """
        return _without_running_loop(lambda: self._runner.run(coroutine))

    def close(self) -> None:
        """Close the loop."""
        _without_running_loop(self._runner.close)


def _without_running_loop(work: Callable[[], T]) -> T:
    """The result of `work`, which runs in another thread if this one has a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        has_loop = False
    else:
        has_loop = True
    if not has_loop:
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="rollout")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
