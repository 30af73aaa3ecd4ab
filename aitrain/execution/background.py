"""User code that outlives one call: it runs in a coroutine or a thread of its own, while calls wait for what it does
next."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from traceback import StackSummary
from typing import Any

from aitrain.execution.async_calls import replace_if_blocked, run_if_async, running_loop
from aitrain.execution.stacks import stack_of_awaitable, stack_of_thread
from aitrain.execution.task import current_task


class BackgroundRun(ABC):
    """One run of user code; `on_end` is called, in any thread, when it has returned or raised."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self.value: object = None
        """What the code returned."""
        self.error: BaseException | None = None
        """What it raised."""
        self.ended = threading.Event()
        self._on_end = on_end

    def _end(self) -> None:
        self.ended.set()
        self._on_end()

    @abstractmethod
    def cancel(self) -> None:
        """Ask the code to end, without waiting for it."""

    @abstractmethod
    def stack(self) -> StackSummary:
        """Its present stack, outermost frame first."""

    @abstractmethod
    def blocks_loop(self, seconds: float) -> bool:
        """Whether it is a coroutine that keeps the shared event loop busy for so long."""


class CoroutineRun(BackgroundRun):
    """Runs a coroutine on the shared event loop."""

    def __init__(self, coroutine: Coroutine[Any, Any, object], on_end: Callable[[], None]) -> None:
        super().__init__(on_end)
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None
        self._loop = running_loop()
        asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    async def _run(self) -> None:
        self._task = asyncio.current_task()
        current_task.set(None)  # the call that started it ends before it does
        try:
            self.value = await self._coroutine
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    def cancel(self) -> None:
        """Cancel the coroutine; if it blocks the event loop, later coroutines get a new one."""
        self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
        threading.Thread(target=replace_if_blocked, args=(self._loop,), daemon=True).start()

    def stack(self) -> StackSummary:
        """The frames that it awaits, or those of the thread that it blocks."""
        return stack_of_awaitable(self._coroutine)

    def blocks_loop(self, seconds: float) -> bool:
        """Whether the loop does not get on with anything else for so long, because of this coroutine."""
        gets_on = threading.Event()
        self._loop.call_soon_threadsafe(gets_on.set)
        return not gets_on.wait(seconds) and asyncio.current_task(self._loop) is self._task


class ThreadRun(BackgroundRun):
    """Runs a function in a thread of its own. Python cannot end a thread, so `cancel` does nothing: what the thread
    waits for has to wake it."""

    def __init__(self, function: Callable[[], object], on_end: Callable[[], None]) -> None:
        super().__init__(on_end)
        self._function = function
        self._thread = threading.Thread(target=self._run, name="environment-rollout", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = run_if_async(self._function())
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    def cancel(self) -> None:
        """Do nothing."""

    def stack(self) -> StackSummary:
        """The frames of its thread."""
        return stack_of_thread(self._thread)

    def blocks_loop(self, seconds: float) -> bool:
        """False: it has a thread of its own."""
        return False
