"""Worker processes for the user's code: for code that hangs, crashes or never lets other threads run.

A fork server, which has one thread and the environment, is forked before torch is imported. Worker processes share its
memory until they write to it; nothing is imported or constructed again."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import random
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from traceback import StackSummary
from typing import Any

from aitrain.execution.async_calls import run_if_async
from aitrain.execution.failure import CallFailed, Failure, as_failure
from aitrain.execution.task import on_cancel, paused
from aitrain.execution.user_code import stack_of_dump
from aitrain.machine import allow_open_files


class MessageSocket:
    """One end of a connection that carries whole messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def fileno(self) -> int:
        """The socket's file descriptor."""
        return self._socket.fileno()

    def send(self, message: bytes, fds: Sequence[int] = ()) -> bool:
        """Send a message; False if the other end is gone."""
        try:
            socket.send_fds(self._socket, [struct.pack("!Q", len(message))], fds)
            self._socket.sendall(message)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[bytes | None, list[int]]:
        """Wait for the next message and its file descriptors; None if the other end is gone."""
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, 8, 8)
            head += self._read(8 - len(head)) if head else b""
            return self._read(struct.unpack("!Q", head)[0]), fds
        except (OSError, EOFError, struct.error):
            return None, []

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def is_open(self) -> bool:
        """Whether the other end is open; valid only while no message is expected from it."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


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
            return stack_of_dump(self._worker.read_dump(), (__file__, answer_call.__name__))


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
