"""Worker processes for the user's code: for code that hangs, crashes or never lets other threads run.

A fork server, which has one thread and the environment, is forked before torch is imported. Worker processes share its
memory until they write to it; nothing is imported or constructed again."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from traceback import StackSummary
from typing import Any

from aitrain.execution.async_calls import run_if_async
from aitrain.execution.failure import CallFailed, Failure, as_failure
from aitrain.execution.process_tree import PR_SET_PDEATHSIG, set_process
from aitrain.execution.task import on_cancel, paused
from aitrain.execution.user_code import stack_of_dump
from aitrain.machine import allow_open_files

Make = Callable[[Any], object]
"""Makes the object whose methods are called, given the environment."""
DUMP_SIGNAL = signal.SIGUSR1
"""Makes a worker process write its stacks, also while its code holds the GIL."""

# -- in the fork server


def run_fork_server(environment: object, make: Make, connection: Connection, close: Sequence[int]) -> None:
    """Serve the training process until it ends."""
    for fd in close:
        with suppress(OSError):
            os.close(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the training process, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = os.fdopen(0, closefd=False)
    gc.freeze()  # memory that is never written to stays shared
    workers = set[int]()
    try:
        while True:
            command, value = connection.recv()
            answer: object = None
            if command == "spawn":
                fds = [recv_handle(connection) for _ in range(2)]
                try:
                    answer = fork(partial(_run_worker, environment, make, fds, connection))
                    workers.add(answer)
                except OSError as error:
                    answer = str(error)
                for fd in fds:
                    os.close(fd)
            elif command == "reap":
                workers.remove(value)
                answer = kill_group(value)
            else:
                try:
                    vars(environment).update({name: pickle.loads(pickled) for name, pickled in value.items()})
                except Exception as error:
                    answer = as_failure(error)
            connection.send(answer)
    except (EOFError, OSError):  # the training process has ended
        pass
    finally:
        for pid in workers:
            kill_group(pid)


# -- in a worker process


def _run_worker(environment: object, make: Make, fds: Sequence[int], control: Connection) -> None:
    control.close()
    for fd in fds:
        os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=partial(os.close, fd))  # its children must not use the connection
    connection = Connection(fds[0])
    faulthandler.register(DUMP_SIGNAL, file=fds[1], all_threads=True)
    _seed_generators(environment)
    made: list[object] = []
    with suppress(EOFError, OSError):  # the training process has ended
        while True:
            if request := connection.recv_bytes():
                connection.send_bytes(_answered(made, partial(make, environment), request))
                _flush()
            else:
                made.clear()


def _seed_generators(environment: object) -> None:
    """Seed the global random generators, and those that are attributes of the environment or its class: all workers
    have inherited the same, and would draw the same numbers in each episode."""
    owners = (*type(environment).__mro__, environment)
    attributes = [value for owner in owners for value in vars(owner).values()]
    generators: list[Any] = [random, *(one for one in attributes if isinstance(one, random.Random))]
    if numpy := sys.modules.get("numpy.random"):
        generators += [numpy, *(one for one in attributes if isinstance(one, numpy.RandomState))]
        for one in attributes:
            if isinstance(one, numpy.Generator):
                one.bit_generator.state = type(one.bit_generator)().state
    for one in generators:
        one.seed()


def _answered(made: list[object], make: Callable[[], object], request: bytes) -> bytes:
    """Call a method, and pickle its value or failure; `made` holds the object after the first call."""
    try:
        method, arguments = pickle.loads(request)
        if not made:
            made.append(make())
        value = run_if_async(getattr(made[0], method)(*arguments))
        return pickle.dumps((value, None))
    except BaseException as error:
        return pickle.dumps((None, as_failure(error)))


# -- on both sides


def fork(body: Callable[[], object]) -> int:
    """Fork a process that runs `body` and exits, without the exit handlers of its parent.

    It has a process group of its own, so that a launcher's SIGTERM to the group of its parent is not for it, and that
    `kill_group` ends what it starts as well. Linux kills it when the thread that forked it ends: if that is the main
    thread, when its parent does.
    """
    _flush()  # otherwise both processes would write the buffered output
    parent, is_main = os.getpid(), threading.current_thread() is threading.main_thread()
    with warnings.catch_warnings():  # other threads are not copied, and none is needed
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        pid = os.fork()
    with suppress(OSError):  # both processes do it: one of them is first
        os.setpgid(pid, pid)
    if pid:
        return pid
    try:
        if is_main:
            set_process(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)
        body()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            _flush()
        os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or none
            stream.flush()


def kill_group(pid: int) -> int:
    """End a forked process and its process group; returns its exit status, also if it had ended before."""
    for kill in (os.killpg, os.kill):
        with suppress(OSError):
            kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


# -- in the training process

SERVER_GONE = Failure("crashed", "crashed: the process that starts environment processes was killed")


@dataclass(eq=False)
class _Worker:
    """The training process's side of a worker process."""

    pid: int
    connection: Connection
    dump: int
    """File descriptor of a pipe to which it writes its stacks on DUMP_SIGNAL."""
    has_ended: bool = False
    """Whether it was ended; its process id may then belong to another process."""


class ProcessPool:
    """Worker processes, forked on demand by a fork server and reused; `start` it before torch is imported, so that they
    do not contain it."""

    def __init__(self, server: Connection, pid: int) -> None:
        self.server_pid = pid
        self._server = server
        self._lock = threading.Lock()
        self._free: list[_Worker] = []

    @classmethod
    def start(cls, environment: object, make: Make, close: Sequence[int] = ()) -> ProcessPool:
        """Fork the server, which closes the file descriptors in `close`."""
        allow_open_files()  # two for each process
        ours, theirs = Pipe()
        pid = fork(partial(run_fork_server, environment, make, theirs, [ours.fileno(), *close]))
        theirs.close()
        return cls(ours, pid)

    def fileno(self) -> int:
        """File descriptor of the connection to the fork server."""
        return self._server.fileno()

    def update(self, attributes: dict[str, bytes]) -> None:
        """Set pickled attributes on the environment, before a process is leased.

        Raises:
            CallFailed: an attribute cannot be unpickled in the fork server, or the fork server is gone.
        """
        failure = self._ask("update", attributes)
        if isinstance(failure, Failure):
            raise CallFailed(failure)

    def lease(self) -> WorkerLease:
        """Lease a process, in which the first call makes the object.

        Raises:
            CallFailed: no process can be started.
        """
        with suppress(IndexError):
            while True:
                worker = self._free.pop()
                if not worker.connection.poll():  # it has not ended
                    return WorkerLease(self, worker)
                self._retire(worker)
        return WorkerLease(self, self._spawn())

    def lease_idle(self) -> list[WorkerLease]:
        """Lease every process that runs and is not leased; none is started."""
        free, self._free = self._free, []
        return [WorkerLease(self, worker) for worker in free]

    def close(self) -> None:
        """End all processes, and wait for them."""
        with self._lock:
            self._server.close()
        until = time.monotonic() + 10.0
        with suppress(ChildProcessError):  # other code has waited for it
            while os.waitpid(self.server_pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(self.server_pid, signal.SIGKILL)
                time.sleep(0.002)
        while self._free:
            self._retire(self._free.pop())

    def take_back(self, worker: _Worker, is_broken: bool) -> None:
        """Keep a worker for the next lease, or end it."""
        if not is_broken:
            with suppress(OSError):  # it has ended
                worker.connection.send_bytes(b"")
                self._free.append(worker)
                return
        self._retire(worker)

    def end(self, worker: _Worker) -> Failure:
        """End a worker; returns how it ended."""
        worker.has_ended = True
        try:
            code = os.waitstatus_to_exitcode(self._ask("reap", worker.pid))
        except CallFailed as error:
            return error.failure
        if code >= 0:
            return Failure("crashed", f"crashed: its process exited with code {code}")
        name = signal.Signals(-code).name if -code in list(signal.Signals) else "unknown"
        return Failure("crashed", f"crashed: its process was ended by signal {-code} ({name})")

    def _retire(self, worker: _Worker) -> None:
        if not worker.has_ended:
            self.end(worker)
        worker.connection.close()
        os.close(worker.dump)

    def _spawn(self) -> _Worker:
        ours, theirs = Pipe()
        reading, writing = os.pipe()
        try:
            pid = self._ask("spawn", None, [theirs.fileno(), writing])
            if not isinstance(pid, int):
                raise CallFailed(Failure("crashed", f"crashed: no process can be started: {pid}"))
        except BaseException:
            ours.close()
            os.close(reading)
            raise
        finally:
            theirs.close()
            os.close(writing)
        return _Worker(pid, ours, reading)

    def _ask(self, command: str, value: object = None, fds: Sequence[int] = ()) -> Any:
        """The fork server's answer; the clock of the calling task is paused meanwhile.

        Raises:
            CallFailed: it is gone.
        """
        with paused(), self._lock:
            try:
                self._server.send((command, value))
                for fd in fds:
                    send_handle(self._server, fd, self.server_pid)
                return self._server.recv()
            except (OSError, EOFError):
                raise CallFailed(SERVER_GONE) from None
            except BaseException:  # after Ctrl+C, the pending answer would be read as that of the next command
                self._server.close()
                raise


class WorkerLease:
    """Exclusive use of one worker process, which holds one object made from the environment; not thread-safe."""

    def __init__(self, pool: ProcessPool, worker: _Worker) -> None:
        self._pool, self._worker = pool, worker
        self._lock = threading.Lock()  # a call may end while another thread ends it
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
        request = pickle.dumps((method, arguments))
        with self._lock:
            if self._failure is not None:
                raise CallFailed(self._failure)
            self._is_calling = True
        answer = b""
        with on_cancel(self.end, self.stack), suppress(OSError, EOFError):
            self._worker.connection.send_bytes(request)
            answer = self._worker.connection.recv_bytes()
        with self._lock:
            self._is_calling = False
            if not answer:
                self._failure = self._failure or self._pool.end(self._worker)
            if self._failure is not None:
                raise CallFailed(self._failure)
        value, failure = pickle.loads(answer)
        if failure is not None:
            raise CallFailed(failure)
        return value

    def release(self, is_spent: bool = False) -> None:
        """Return the process to the pool; its object is dropped, and a process that is broken or spent is ended."""
        with self._lock:
            was_released, self._is_released = self._is_released, True
        if not was_released:
            self._pool.take_back(self._worker, is_spent or self._is_calling or self._failure is not None)

    def end(self, failure: Failure) -> None:
        """End the call, which then fails with `failure`; in another thread than that of the call."""
        with self._lock:
            if self._is_calling:
                self._failure = failure
                self._pool.end(self._worker)

    def stack(self) -> StackSummary:
        """The stack of the user's code in the process; its id is still valid, as only `end` waits for the process."""
        with self._lock:
            if not self._is_calling or self._worker.has_ended:
                return StackSummary()
            with suppress(ProcessLookupError):
                os.kill(self._worker.pid, DUMP_SIGNAL)
            poll, text, part = select.poll(), b"", b"nothing yet"
            poll.register(self._worker.dump, select.POLLIN)
            while part and poll.poll(50 if text else 2000):
                part = os.read(self._worker.dump, 1 << 16)
                text += part
            return stack_of_dump(text.decode("ascii", "replace"), (__file__, _answered.__name__))
