"""The fork server and the worker processes that it forks: what runs outside of the training process.

The fork server has one thread and the environment, and is forked before torch is imported. Worker processes share its
memory until they write to it; nothing is imported or constructed again.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from aitrain.execution.async_calls import run_if_async
from aitrain.execution.failure import CallFailed, Failure, as_failure
from aitrain.execution.message_socket import MessageSocket

DUMP_SIGNAL = signal.SIGUSR1
"""Makes a worker process write its stacks, also while its code holds the GIL."""

Request = tuple[Callable[[object], object] | None, str, tuple[object, ...]]
"""Function that makes the worker's object from the environment; method of the object to call; its arguments."""
Answer = tuple[object, Failure | None]
"""The method's return value, or its failure."""


def run_fork_server(environment: object, connection: socket.socket, close: Sequence[int], parent: int | None) -> None:
    """Serve the training process until it ends; on Linux, this process is killed when `parent` ends."""
    for fd in close:
        with suppress(OSError):
            os.close(fd)
    if parent is not None:
        end_with(parent)
    os.setpgid(0, 0)  # a launcher's SIGTERM to the group of the training process is for that one
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the training process, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _detach_stdin()
    gc.freeze()  # memory that is never written to stays shared
    server = _ForkServer(environment, connection)
    try:
        server.serve()
    finally:
        server.end_all()


class _ForkServer:
    def __init__(self, environment: object, connection: socket.socket) -> None:
        self._environment, self._connection = environment, connection
        self._workers: set[int] = set()

    def serve(self) -> None:
        """Run commands: spawn, copy, reap, update."""
        messages = MessageSocket(self._connection)
        while (received := messages.receive())[0] is not None:
            command, value = pickle.loads(received[0])
            if command == "spawn":
                body = partial(_run_worker, self._environment, received[1], self._connection, os.getpid())
                answer: object = self._start(body)
            elif command == "copy":
                answer = self._start(partial(_run_copy, self._environment, received[1][0], self._connection))
            else:
                answer = self.reap(value) if command == "reap" else self._update(value)
            for fd in received[1]:
                os.close(fd)
            messages.send(pickle.dumps(answer))

    def end_all(self) -> None:
        """End all worker processes."""
        for pid in list(self._workers):
            self.reap(pid)

    def _start(self, body: Callable[[], object]) -> int | str:
        try:
            pid = fork(body)
        except OSError as error:
            return str(error)
        with suppress(OSError):  # the worker does the same: one of the two is first
            os.setpgid(pid, pid)
        self._workers.add(pid)
        return pid

    def reap(self, pid: int) -> int | None:
        """End a worker and its process group; returns its exit status, also if it had ended before."""
        if pid not in self._workers:
            return None
        self._workers.remove(pid)
        for kill in (os.killpg, os.kill):
            with suppress(OSError):
                kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]

    def _update(self, attributes: dict[str, bytes]) -> Failure | None:
        try:
            vars(self._environment).update({name: pickle.loads(value) for name, value in attributes.items()})
        except Exception as error:
            return as_failure(error)
        return None


def _run_copy(environment: object, connection: int, control: socket.socket) -> None:
    """In a forked process: be another fork server, which is there when this one is killed, and ends when the training
    process does."""
    os.setpgid(0, 0)
    control.close()
    run_fork_server(environment, socket.socket(fileno=connection), [], None)


# -- in a worker process


def _run_worker(environment: object, fds: Sequence[int], control: socket.socket, parent: int) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)  # so that what the user's code starts is ended with it
    end_with(parent)
    control.close()
    connection, dump = fds
    for fd in fds:
        os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=partial(os.close, fd))  # its children must not use the connection
    faulthandler.register(DUMP_SIGNAL, file=dump, all_threads=True)
    _reseed()
    _serve_calls(MessageSocket(socket.socket(fileno=connection)), environment)


def _serve_calls(messages: MessageSocket, environment: object) -> None:
    made: list[object] = []
    while (request := messages.receive()[0]) is not None:
        if request:
            messages.send(answer_call(made, environment, request))
            _flush()
        else:
            made.clear()


def answer_call(made: list[object], environment: object, request: bytes) -> bytes:
    """Call the method of a pickled Request, and pickle the Answer; `made` holds the object after the first call."""
    try:
        make, method, arguments = pickle.loads(request)
        if not made:
            made.append(run_if_async(make(environment)))
        value = run_if_async(getattr(made[0], method)(*arguments))
        return pickled((value, None), "returned")
    except BaseException as error:
        return pickle.dumps((None, as_failure(error)))


def _reseed() -> None:
    """Reseed the global generators, which all workers have inherited."""
    random.seed()
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()


# -- on both sides


def pickled(message: Request | Answer, did: str) -> bytes:
    """The message, pickled.

    Raises:
        CallFailed: it cannot be pickled; `did` begins the message: "returned", "was given".
    """
    try:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        parts = [one for part in message for one in (part if isinstance(part, tuple) else [part])]
        kinds = [type(part).__name__ for part in parts if not _can_be_pickled(part)]
        why = f"{did} a {kinds[0] if kinds else 'tuple'}, which cannot be passed between processes"
        raise CallFailed(Failure("wrong_type", why, traceback.format_exc())) from error


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return False
    return True


def fork(body: Callable[[], object]) -> int:
    """Fork a process that runs `body` and exits, without the exit handlers of its parent."""
    _flush()  # otherwise both processes would write the buffered output
    pid = os.fork()
    if pid:
        return pid
    try:
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


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends; Linux only. Elsewhere it ends when the socket is closed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)


def _detach_stdin() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = os.fdopen(0, closefd=False)
