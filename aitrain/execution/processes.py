"""Worker processes for the user's code: for code that hangs, crashes or never lets other threads run.

A fork server, which has one thread and the environment, is forked before torch is imported. Worker processes share its
memory until they write to it; nothing is imported or constructed again."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from traceback import StackSummary
from typing import Any

from aitrain.execution.async_calls import run_if_async
from aitrain.execution.failure import CallFailed, Failure, as_failure
from aitrain.execution.process_tree import PR_SET_PDEATHSIG, set_process
from aitrain.execution.task import paused, wait_until
from aitrain.execution.user_code import stack_of_dump
from aitrain.machine import allow_open_files

Make = Callable[[Any], object]
"""Makes the object whose methods are called, given the environment."""
DUMP_SIGNAL = signal.SIGUSR1
"""Makes a worker process write its stacks, also while its code holds the GIL."""

# -- in the fork server


def run_fork_server(environment: object, make: Make, connection: Connection, parents: Connection) -> None:
    """Answer the training process until it sends None or closes the connection, of which only it has the other end."""
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the training process, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = os.fdopen(0, closefd=False)
    gc.freeze()  # memory that is never written to stays shared
    workers = set[int]()
    try:
        for command, value in iter(connection.recv, None):
            answer: Any = None
            try:
                if command == "spawn":
                    fd = recv_handle(connection)
                    try:
                        answer = fork(partial(_run_worker, environment, make, fd, connection))
                        workers.add(answer)
                    finally:
                        os.close(fd)
                elif command == "reap":
                    workers.remove(value)
                    answer = kill_group(value)
                else:
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


def _run_worker(environment: object, make: Make, fd: int, control: Connection) -> None:
    control.close()
    os.set_inheritable(fd, False)
    os.register_at_fork(after_in_child=partial(os.close, fd))  # its children must not use the connection
    connection = Connection(fd)
    faulthandler.register(DUMP_SIGNAL, file=fd, all_threads=True)  # in the place of an answer: it is ended afterwards
    _seed_generators(environment)
    made: list[object] = []
    with suppress(EOFError, OSError):  # the training process has ended
        while True:
            request = connection.recv_bytes()
            connection.send_bytes(_answered(made, partial(make, environment), request))
            _flush()


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
    """Call a method, and pickle its value or its Failure; `made` holds the object from the first call until `close`."""
    try:
        method, arguments = pickle.loads(request)
        if not made:
            made.append(make())
        one = made.pop() if method == "close" else made[0]
        value = run_if_async(getattr(one, method)(*arguments))
        return pickle.dumps(value)
    except BaseException as error:
        return pickle.dumps(as_failure(error))


# -- on both sides


def fork(body: Callable[[], object]) -> int:
    """Fork a process that runs `body` and exits, without the exit handlers of its parent.

    It has a process group of its own, so that a launcher's SIGTERM to the group of its parent is not for it, and that
    `kill_group` ends what it starts as well. Linux kills it when the thread that forked it ends: if that is the main
    thread, when its parent does.
    """
    _flush()  # otherwise both processes would write the buffered output
    parent, is_main = os.getpid(), threading.current_thread() is threading.main_thread()
    pid = os.fork()  # other threads are not copied, and none is needed
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


class ProcessPool:
    """Worker processes, forked on demand by a fork server and reused. It is made before torch is imported, so that they
    do not contain it."""

    def __init__(self, environment: object, make: Make) -> None:
        """Fork the server."""
        allow_open_files()  # one for each process
        self._server, theirs = Pipe()
        self.server_pid = fork(partial(run_fork_server, environment, make, theirs, self._server))
        theirs.close()
        self._lock = threading.Lock()
        self.free = set[Worker]()
        """Processes that are not leased."""

    def update(self, attributes: dict[str, bytes]) -> None:
        """Set pickled attributes on the environment, before a process is leased.

        Raises:
            CallFailed: an attribute cannot be unpickled in the fork server, or the fork server is gone.
        """
        self.ask("update", attributes)

    def lease(self) -> Worker:
        """A process that runs no episode, in which the first call makes the object.

        Raises:
            CallFailed: no process can be started.
        """
        with suppress(KeyError):
            while True:
                worker = self.free.pop()
                if not worker.connection.poll():  # it has not ended
                    return worker
                worker.end()
        ours, theirs = Pipe()
        with theirs:
            return Worker(self, self.ask("spawn", send=theirs), ours)

    def close(self) -> None:
        """End all processes, and wait for them."""
        with self._lock:
            with suppress(OSError):  # the server is gone
                self._server.send(None)  # a server that was forked later has the end of the connection, too
            self._server.close()
        until = time.monotonic() + 10.0
        with suppress(ChildProcessError):  # other code has waited for it
            while os.waitpid(self.server_pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(self.server_pid, signal.SIGKILL)
                time.sleep(0.002)
        self.free.clear()

    def ask(self, command: str, value: object = None, send: Connection | None = None) -> Any:
        """The fork server's answer; the clock of the calling task is paused meanwhile.

        Raises:
            CallFailed: it has failed, or is gone.
        """
        with paused(), self._lock:
            try:
                self._server.send((command, value))
                if send is not None:
                    send_handle(self._server, send.fileno(), self.server_pid)
                answer = self._server.recv()
            except (OSError, EOFError):
                raise CallFailed(SERVER_GONE) from None
            except BaseException:  # after Ctrl+C, the pending answer would be read as that of the next command
                self._server.close()
                raise
        if isinstance(answer, Failure):
            raise CallFailed(answer)
        return answer


class Worker:
    """The training process's side of one worker process, which holds one object made from the environment: methods of
    this one that are not below are called there. It is used by one episode at a time."""

    def __init__(self, pool: ProcessPool, pid: int, connection: Connection) -> None:
        self.pid, self.connection = pid, connection
        self._pool = pool
        self._lock = threading.Lock()  # an abandoned call may still run
        self._failure: Failure | None = None
        self.is_spent = False
        """Whether the process ends after its episode, so that the next one begins with an environment as build_dataset
        left it."""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self.call, method)

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the object; inside a task, it is ended at the task's deadline.

        Raises:
            CallFailed: it raised, hung or crashed; after a hang or a crash, all further calls fail too.
        """
        request = pickle.dumps((method, arguments))
        with self._lock:
            if self._failure is not None:
                raise CallFailed(self._failure)
            try:
                self.connection.send_bytes(request)
                wait_until(self.connection.poll, self._stack)
                answer = self.connection.recv_bytes()
            except BaseException as error:
                self._failure = self.end()
                if isinstance(error, CallFailed):  # at the deadline
                    self._failure = error.failure
                elif not isinstance(error, (OSError, EOFError)):
                    raise
                raise CallFailed(self._failure) from None
        value = pickle.loads(answer)
        if isinstance(value, Failure):
            raise CallFailed(value)
        return value

    def close(self) -> None:
        """Close the object, and return the process to the pool; one that is broken or spent is ended."""
        with suppress(CallFailed):
            self.call("close")
            if self.is_spent:
                self.call("close_environment")
        with self._lock:
            if self._failure is None and self.is_spent:
                self._failure = self.end()
            elif self._failure is None:
                self._pool.free.add(self)

    def end(self) -> Failure:
        """End the process; returns how it ended."""
        self.connection.close()
        try:
            code = os.waitstatus_to_exitcode(self._pool.ask("reap", self.pid))
        except CallFailed as error:
            return error.failure
        if code >= 0:
            return Failure("crashed", f"crashed: its process exited with code {code}")
        return Failure("crashed", f"crashed: its process was ended by signal {-code} ({signal.strsignal(-code)})")

    def _stack(self) -> StackSummary:
        """The stack of the user's code in the process, which has to be ended then: it does not answer any more."""
        text, seconds = b"", 2.0
        with suppress(OSError):  # it has ended
            os.kill(self.pid, DUMP_SIGNAL)
            while self.connection.poll(seconds) and (part := os.read(self.connection.fileno(), 1 << 16)):
                text, seconds = text + part, 0.05
        return stack_of_dump(text.decode("ascii", "replace"), (__file__, _answered.__name__))
