"""Worker processes for the user's code: for code that hangs, crashes or never lets other threads run."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from traceback import StackSummary
from typing import Any

from aitrain.execution import fork_server
from aitrain.execution.failure import CallFailed, Failure
from aitrain.execution.fork_server import DUMP_SIGNAL, Request, answer_call, fork, pickled, run_fork_server
from aitrain.execution.message_socket import MessageSocket
from aitrain.execution.stacks import stack_of_dump
from aitrain.execution.task import on_cancel, paused
from aitrain.machine import allow_open_files

SERVER_GONE = Failure("crashed", "crashed: the process that starts environment processes was killed")


class ProcessPool:
    """Worker processes, forked on demand by a fork server and reused; `start` it before torch is imported, so that they
    do not contain it."""

    def __init__(self, server: MessageSocket, pid: int) -> None:
        self.server_pid = pid
        self._server = server
        self._spare: tuple[MessageSocket, int] | None = None
        """A copy of the fork server, with its process id, which takes its place if it is killed."""
        self._lock = threading.Lock()
        self._free: list[_Worker] = []
        self._lost: list[int] = []  # process ids of workers whose lease was dropped without a release
        self._generation = 0
        self._is_open = True
        self._make_spare()

    @classmethod
    def start(cls, environment: object, close: Sequence[int] = ()) -> ProcessPool:
        """Fork the server, which closes the file descriptors in `close`."""
        allow_open_files()  # two for each process
        ours, theirs = socket.socketpair()
        # Linux ends the server with the thread that forked it, so only the main thread is watched
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        with warnings.catch_warnings():  # a notebook has threads, but the server needs none of them
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            pid = fork(partial(run_fork_server, environment, theirs, [ours.fileno(), *close], parent))
        theirs.close()
        return cls(MessageSocket(ours), pid)

    @property
    def fds(self) -> list[int]:
        """File descriptors of the connections to the fork server and its spare."""
        return [self._server.fileno(), *([self._spare[0].fileno()] if self._spare else [])]

    def update(self, attributes: dict[str, bytes]) -> None:
        """Set pickled attributes on the environment, for the processes that are leased from now on.

        Raises:
            CallFailed: an attribute cannot be unpickled in the fork server, or the fork server is gone.
        """
        self._generation += 1
        failure = self._ask("update", attributes)
        with self._lock:
            if self._spare:
                self._exchange(self._spare[0], "update", attributes)
        while self._free:
            self._retire(self._free.pop())
        if isinstance(failure, Failure):
            raise CallFailed(failure)

    def lease(self, make: Callable[[object], object]) -> WorkerLease:
        """Lease a process, in which the first call makes `make(environment)`.

        Raises:
            CallFailed: no process can be started.
        """
        while self._lost:
            with suppress(IndexError):  # another thread has just taken the last
                self._ask("reap", self._lost.pop())
        return WorkerLease(self, self._free_worker() or self._spawn(), make)

    def lease_idle(self, make: Callable[[object], object]) -> list[WorkerLease]:
        """Lease every process that runs and is not leased; none is started."""
        free, self._free = self._free, []
        return [WorkerLease(self, worker, make) for worker in free]

    def close(self) -> None:
        """End all processes, and wait for them."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
            self._server.close()
            if self._spare:
                self._spare[0].close()
        if not was_open:
            return
        while self._free:
            self._free.pop().close()
        with suppress(ChildProcessError):  # other code has waited for it
            if not _has_ended(self.server_pid, 10.0):
                os.kill(self.server_pid, signal.SIGKILL)
                os.waitpid(self.server_pid, 0)

    def take_back(self, worker: _Worker, is_broken: bool) -> None:
        """Keep a worker for the next lease, or end it."""
        if is_broken or worker.generation != self._generation or not worker.messages.send(b""):
            self._retire(worker)
        else:
            self._free.append(worker)

    def end(self, worker: _Worker) -> Failure:
        """End a worker; returns how it ended.

        Raises:
            CallFailed: the fork server is gone.
        """
        worker.when_lost.detach()
        return _crash(self._ask("reap", worker.pid))

    def _free_worker(self) -> _Worker | None:
        while self._free:
            with suppress(IndexError):  # another thread has just taken the last
                worker = self._free.pop()
                if worker.messages.is_open():
                    return worker
                self._retire(worker)
        return None

    def _retire(self, worker: _Worker) -> None:
        with suppress(CallFailed):  # the fork server is gone, and the worker with it
            if not worker.has_ended:
                self.end(worker)
        worker.close()

    def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        dump, dump_end = os.pipe()
        generation, pid = self._generation, None
        try:
            pid = self._ask("spawn", None, [theirs.fileno(), dump_end])
        finally:
            theirs.close()
            os.close(dump_end)
            if not isinstance(pid, int):
                ours.close()
                os.close(dump)
        if not isinstance(pid, int):
            raise CallFailed(Failure("crashed", f"crashed: no process can be started: {pid}"))
        worker = _Worker(pid, MessageSocket(ours), FileIO(dump), generation)
        worker.when_lost = weakref.finalize(worker, self._lost.append, pid)
        worker.when_lost.atexit = False
        return worker

    def _ask(self, command: str, value: object = None, fds: Sequence[int] = ()) -> object:
        """The fork server's answer, or its spare's if it was killed; the clock of the calling task is paused
        meanwhile.

        Raises:
            CallFailed: both are gone.
        """
        with paused(), self._lock:
            answer = self._exchange(self._server, command, value, fds)
            if answer is None and self._is_open and self._spare:
                self._server.close()
                (self._server, self.server_pid), self._spare = self._spare, None
                answer = self._exchange(self._server, command, value, fds)
                self._make_spare()
        if answer is None:
            raise CallFailed(SERVER_GONE)
        result: object = pickle.loads(answer)
        return result

    def _exchange(
        self, server: MessageSocket, command: str, value: object = None, fds: Sequence[int] = ()
    ) -> bytes | None:
        """The pickled answer of a fork server; None if it is gone."""
        try:
            return server.receive()[0] if server.send(pickle.dumps((command, value)), fds) else None
        except BaseException:
            server.close()  # after Ctrl+C, the pending answer would be read as that of the next command
            raise

    def _make_spare(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            answer = self._exchange(self._server, "copy", None, [theirs.fileno()])
        pid = None if answer is None else pickle.loads(answer)
        if isinstance(pid, int):
            self._spare = MessageSocket(ours), pid
        else:  # there is no memory for it
            ours.close()


class WorkerLease:
    """Exclusive use of one worker process, which holds one object made from the environment; not thread-safe."""

    def __init__(self, pool: ProcessPool, worker: _Worker, make: Callable[[object], object]) -> None:
        self._pool, self._worker = pool, worker
        self._make: Callable[[object], object] | None = make
        self._lock = threading.Lock()  # a call may end while the deadline thread ends it
        self._is_calling = self._is_released = False
        self._failure: Failure | None = None

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._worker.pid

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the object; inside a task, it is ended at the task's deadline.

        Raises:
            CallFailed: it raised, hung or crashed; after a hang or a crash, all further calls fail too.
        """
        if self._is_released:
            raise RuntimeError("this lease was released")
        request: Request = (self._make, method, arguments)
        answer = self._exchange(pickled(request, "was given"))
        try:
            value, failure = pickle.loads(answer)
        except Exception as error:
            why = f"returned what cannot be passed between processes: {error!r}"[:300]
            value, failure = None, Failure("wrong_type", why)
        if failure is not None:
            raise CallFailed(failure)
        self._make = None
        return value

    def _exchange(self, message: bytes) -> bytes:
        """Send a pickled Request; returns the pickled Answer.

        Raises:
            CallFailed: the process hung or crashed.
        """
        with self._lock:
            if self._failure is not None:
                raise CallFailed(self._failure)
            self._is_calling = True
        with on_cancel(self.end, self.stack):
            answer = self._worker.messages.receive()[0] if self._worker.messages.send(message) else None
        with self._lock:
            self._is_calling = False
        if answer is None or self._failure is not None:
            self._failure = self._failure or self._crashed()
            raise CallFailed(self._failure)
        return answer

    def release(self, is_spent: bool = False) -> None:
        """Return the process to the pool; its object is dropped, and a process that is broken or spent is ended."""
        with self._lock:
            was_released, self._is_released = self._is_released, True
        if not was_released:
            self._pool.take_back(self._worker, is_spent or self._is_calling or self._failure is not None)

    def _crashed(self) -> Failure:
        try:
            return self._pool.end(self._worker)
        except CallFailed as error:
            return error.failure

    def end(self, failure: Failure) -> None:
        """End the call, which then fails with `failure`; for the deadline thread."""
        with self._lock:
            if self._is_calling:
                self._failure = failure
                self._crashed()

    def stack(self) -> StackSummary:
        """The stack of the user's code in the process; its id is still valid, as only `end` waits for the process."""
        with self._lock:
            if not self._is_calling:
                return StackSummary()
            with suppress(ProcessLookupError):
                os.kill(self._worker.pid, DUMP_SIGNAL)
            return stack_of_dump(self._worker.read_dump(), (fork_server.__file__, answer_call.__name__))


class _Worker:
    """The training process's side of a worker process."""

    when_lost: weakref.finalize[..., _Worker]

    def __init__(self, pid: int, messages: MessageSocket, dump: FileIO, generation: int) -> None:
        self.pid, self.messages, self.generation = pid, messages, generation
        self._dump = dump

    @property
    def has_ended(self) -> bool:
        """Whether it was ended; its process id may then belong to another process."""
        return not self.when_lost.alive

    def read_dump(self) -> str:
        """The stacks that it writes on DUMP_SIGNAL."""
        poll, text, patience = select.poll(), b"", 2000
        poll.register(self._dump, select.POLLIN)
        while poll.poll(patience) and (part := self._dump.read(65536)):
            text, patience = text + part, 50
        return text.decode("ascii", "replace")

    def close(self) -> None:
        """Close the connections to it."""
        self.messages.close()
        self._dump.close()


def _has_ended(pid: int, seconds: float) -> bool:
    """Whether a process ends within these seconds."""
    until = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def _crash(status: object) -> Failure:
    """The failure of a call whose process ended with this status; None: with the fork server that had started it."""
    if not isinstance(status, int):
        return SERVER_GONE
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return Failure("crashed", f"crashed: its process exited with code {code}")
    name = signal.Signals(-code).name if -code in list(signal.Signals) else "unknown"
    return Failure("crashed", f"crashed: its process was ended by signal {-code} ({name})")
