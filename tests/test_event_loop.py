"""Coroutines that are run from code that is not async."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from aitrain.rollout.event_loop import event_loop


def test_ctrl_c_in_a_notebook_ends_what_runs_in_the_other_thread() -> None:
    """The calling thread gets it, and the coroutine would go on beside whatever comes next."""
    cancelled, main = [], threading.get_ident()

    async def interrupt() -> None:
        await asyncio.sleep(0.05)  # the calling thread waits
        signal.pthread_kill(main, signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def cell() -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        loop = event_loop()
        try:
            with pytest.raises(KeyboardInterrupt):
                loop.run(interrupt())
        finally:
            signal.signal(signal.SIGINT, before)
        assert cancelled == [True]
        assert loop.run(asyncio.sleep(0, 1)) == 1
        loop.close()

    asyncio.run(cell())
