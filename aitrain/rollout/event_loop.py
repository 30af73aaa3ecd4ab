"""One event loop for the rollouts of a process, run from code that is not async."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

CANCEL_SECONDS = 4.0
"""Seconds that a cancelled coroutine has to end."""


class ThreadLoop:
    """A loop in a thread of its own, on which several threads may run coroutines at the same time."""

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        """`prepare` is called first, in the loop's thread."""
        self._loop = asyncio.new_event_loop()
        self._loop.call_soon(prepare)
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; what it raises is raised."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():  # Ctrl-C, which the calling thread gets
                self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel all that runs, and wait for its end."""

        async def cancel() -> None:
            if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=CANCEL_SECONDS)

        with suppress(TimeoutError):  # it hangs
            asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(2 * CANCEL_SECONDS)

    def close(self) -> None:
        """Cancel all that runs and close the loop, unless it hangs."""
        self.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CANCEL_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


EventLoop: TypeAlias = asyncio.Runner | ThreadLoop


def event_loop() -> EventLoop:
    """A loop on which one coroutine after another runs, so that connections stay usable from one rollout to the next.

    In a notebook the calling thread has a running loop already; there, another thread runs the coroutines.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.Runner()
    return ThreadLoop()
