"""The event loop that all `async def` methods of the user share: a client opened in one stays usable in the next."""

import asyncio
import inspect
import os
import sys
import threading
from collections.abc import Awaitable
from concurrent.futures import wait
from functools import partial
from typing import TypeVar

from aitrain.execution.task import wait_until
from aitrain.execution.user_code import stack_of_awaitable

T = TypeVar("T")

ANSWER_SECONDS = 1.0
"""Seconds after which a loop that does not answer is blocked."""


def run_if_async(value: T | Awaitable[T]) -> T:
    """The value itself, or the result of a method that was `async def`, which runs on the shared loop even if the
    calling thread has a running loop."""
    if not inspect.isawaitable(value):
        return value

    async def awaited() -> T:
        return await value

    loop = shared_loop()
    if (begin := getattr(sys.gettrace(), "begin_on_loop", None)) is not None:  # the calls of the user are watched
        loop.call_soon_threadsafe(begin)
    future = asyncio.run_coroutine_threadsafe(awaited(), loop)
    try:
        wait_until(lambda seconds: wait([future], seconds).done, partial(stack_of_awaitable, value))
        return future.result()
    except BaseException:
        if future.cancel():  # it has not ended by itself
            replace_if_blocked(loop)
        raise


def replace_if_blocked(loop: asyncio.AbstractEventLoop) -> None:
    """Give later calls a new loop if an `async def` that never yields blocks this one."""
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    if not answered.wait(ANSWER_SECONDS):
        with _lock:
            if loop in _loops:
                _loops.clear()


def is_on_shared_loop() -> bool:
    """Whether the calling code runs on the shared loop, which other calls wait for."""
    try:
        return asyncio.get_running_loop() in _loops
    except RuntimeError:  # there is none in this thread
        return False


def shared_loop() -> asyncio.AbstractEventLoop:
    """The loop, which runs in its own thread; threads that ask for it at the same time get the same one."""
    with _lock:
        if not _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=(loop,), name="environment-loop", daemon=True).start()
            _loops.append(loop)
        return _loops[0]


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            return loop.run_forever()
        except (KeyboardInterrupt, SystemExit):
            pass  # the waiting thread gets the exception too; asyncio also ends the loop with it


_lock = threading.Lock()
_loops = list[asyncio.AbstractEventLoop]()
"""The shared loop, once there is one."""


def _forget_loop() -> None:
    """Reset loop and lock in a forked process, which has no other threads."""
    global _lock
    _lock = threading.Lock()
    _loops.clear()


os.register_at_fork(after_in_child=_forget_loop)
