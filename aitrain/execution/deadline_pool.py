"""Calls into the user's code, each in a thread of its own and with a deadline.

A call that waits for something outside its thread keeps its deadline itself (`task.py: wait_until`). Python cannot end
a thread. One whose call hangs is abandoned: the call fails with its stack, and the thread is counted, and ends when its
call ends.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from aitrain import activity
from aitrain.execution.async_calls import run_if_async
from aitrain.execution.failure import Failure, as_failure
from aitrain.execution.task import Outcome, Task, current_task
from aitrain.execution.user_code import stack_of_thread

T = TypeVar("T")

GRACE = 5.0
"""Seconds after its deadline in which a waiting call can still fail by itself, before its thread is abandoned."""
POLL = 2.0
"""Maximum seconds between two checks of a call, as its clock may be paused meanwhile."""
CANCELLED = Failure("raised", "cancelled: the result is no longer needed")


class DeadlinePool:
    """Makes at most `max_calls` calls at the same time; each has `timeout` seconds from its start."""

    def __init__(self, max_calls: int, timeout: float) -> None:
        self.max_calls, self.timeout = max_calls, timeout
        self.last_hang = ""
        """The line of the user's code at which the last abandoned call hangs."""
        self._abandoned = list[threading.Thread]()
        self._slots = defaultdict[asyncio.AbstractEventLoop, asyncio.Semaphore](lambda: asyncio.Semaphore(max_calls))

    @property
    def abandoned(self) -> int:
        """Number of threads of abandoned calls that are still running."""
        return sum(thread.is_alive() for thread in self._abandoned)

    async def call(self, job: Callable[[], T], timeout: float | None = None) -> Outcome[T]:
        """The outcome of `job`, called in a thread; an awaitable that it returns is awaited on the shared loop. A call
        whose awaiting task is cancelled is abandoned. `timeout` takes the place of the pool's."""
        loop = asyncio.get_running_loop()
        task, ended = Task(self.timeout if timeout is None else timeout), loop.create_future()
        outcomes, is_awaited = list[Outcome[T]](), False

        def run() -> None:
            current_task.set(task)
            task.pause(-1)
            value, failure = None, None
            try:
                value = run_if_async(job())
            except BaseException as error:
                failure = as_failure(error)
            failure = task.abandoned or failure
            outcomes.append(Outcome(None if failure else value, task.ran(), failure))
            activity.own.tick()
            if is_awaited:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(ended.set_result, None)

        async with self._slots[loop]:
            thread = threading.Thread()
            try:
                while not outcomes:
                    # also if one has ended before the call began: Python 3.11 raises in a thread that starts while
                    # another one sets a trace function
                    if not thread.is_alive() and not outcomes:
                        thread = threading.Thread(target=run, name="environment-call", daemon=True)
                        with suppress(RuntimeError):  # the system's limit is reached: other threads have to end
                            thread.start()
                    is_awaited = True
                    if outcomes:  # a short call is over before its thread has let this one go on
                        break
                    fails_by_itself = task.stack is not None or task.abandoned is not None
                    left = task.left() + (GRACE if fails_by_itself else 0.0)
                    if left <= 0:
                        failure = task.time_out(stack_of_thread(thread))
                        self.last_hang = failure.message.partition("\n")[2]
                        break
                    await asyncio.wait([ended], timeout=min(POLL, left))
            finally:
                if not outcomes:
                    task.abandoned = task.abandoned or CANCELLED
                    self._abandoned.append(thread)
        return outcomes[0] if outcomes else Outcome(None, task.ran(), task.abandoned, is_running=True)

    def call_all(self, jobs: Sequence[Callable[[], Any]]) -> list[Outcome[Any]]:
        """The outcomes of calls, for which the calling thread waits."""
        outcomes = list[Outcome[Any]]()

        async def call() -> None:
            outcomes.extend(await asyncio.gather(*map(self.call, jobs)))

        thread = threading.Thread(target=asyncio.run, args=[call()], daemon=True)  # this one may have a running loop
        thread.start()
        thread.join()
        return outcomes
