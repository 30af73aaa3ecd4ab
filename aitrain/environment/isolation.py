"""The environment's code in processes of its own, for code that hangs, crashes or never lets other threads run.

The training process forks a nursery, which has one thread and the environment, and forks the others on demand: its
memory is shared with them until somebody writes to it, and nothing is imported or constructed again.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import random
import re
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
from typing import Any

from aitrain.environment.contract import ended_by, finished
from aitrain.environment.failures import CallFailed, Failure
from aitrain.environment.loader import users_line
from aitrain.environment.workers import failure_of, paused

GONE = Failure("crashed", "crashed: the process that starts environment processes is gone")
MANY_FILES = 8192
_WHERE = signal.SIGUSR1  # a child that gets it says where it is, also while its code keeps other threads from running


class Isolation:
    """Processes for the environment's code; `start` before torch is imported, which they need not carry."""

    def __init__(self, wire: _Wire, pid: int) -> None:
        self._wire, self._pid = wire, pid
        self._lock = threading.Lock()
        self._free: list[_Child] = []
        self._lost: list[int] = []  # of children that were leased by a thread which was given up then
        self._generation = 0
        self._is_open = True

    @classmethod
    def start(cls, environment: Any, close: Sequence[int] = ()) -> Isolation:
        """Fork the nursery; it closes these file descriptors, which must not be kept open by anybody else."""
        _allow_many_files()
        ours, theirs = socket.socketpair()
        # the system watches the thread that forks: the nursery would end with one that is not the main one
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
        with warnings.catch_warnings():  # a notebook has threads, none of which the nursery relies on
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            pid = _fork(partial(_run_nursery, environment, theirs, [ours.fileno(), *close], parent))
        theirs.close()
        return cls(_Wire(ours), pid)

    def update(self, attributes: dict[str, bytes]) -> None:
        """Set pickled attributes on the environment, for the processes that are leased from now on.

        Raises:
            CallFailed: one of them cannot be unpickled there, or the nursery is gone.
        """
        self._generation += 1
        failure = self._ask("update", attributes)
        while self._free:
            self._retire(self._free.pop())
        if failure is not None:
            raise CallFailed(failure)

    def lease(self, make: Callable[[Any], Any]) -> Seat:
        """A process of one's own, in which the first call makes `make(environment)`.

        Raises:
            CallFailed: no process can be started.
        """
        with paused():
            while self._lost:
                self._ask("reap", self._lost.pop())
            return Seat(self, self._free_one() or self._spawn(), make)

    def close(self) -> None:
        """End all processes, and wait for them."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
            self._wire.close()
        if not was_open:
            return
        while self._free:
            self._free.pop().close()
        with suppress(ChildProcessError):  # somebody else has waited for it
            if not _wait_for(self._pid, 10.0):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)

    def take_back(self, child: _Child, is_broken: bool) -> None:
        """Keep it for the next lease, or end it."""
        with paused():
            if is_broken or child.generation != self._generation or not child.wire.send(b""):
                self._retire(child)
            else:
                self._free.append(child)

    def end(self, child: _Child) -> Failure:
        """End a process, and say how it ended.

        Raises:
            CallFailed: the nursery is gone.
        """
        child.when_lost.detach()
        return _ended(self._ask("reap", child.pid))

    def _free_one(self) -> _Child | None:
        while self._free:
            with suppress(IndexError):  # another thread has just taken the last
                child = self._free.pop()
                if child.wire.is_open():
                    return child
                self._retire(child)
        return None

    def _retire(self, child: _Child) -> None:
        with suppress(CallFailed):  # the nursery is gone, and it with it
            if not child.has_ended:
                self.end(child)
        child.close()

    def _spawn(self) -> _Child:
        ours, theirs = socket.socketpair()
        where, told = os.pipe()
        generation, pid = self._generation, None
        try:
            pid = self._ask("spawn", None, [theirs.fileno(), told])
        finally:
            theirs.close()
            os.close(told)
            if not isinstance(pid, int):
                ours.close()
                os.close(where)
        if not isinstance(pid, int):
            raise CallFailed(Failure("crashed", f"crashed: no process can be started: {pid}"))
        child = _Child(pid, _Wire(ours), FileIO(where), generation)
        child.when_lost = weakref.finalize(child, self._lost.append, pid)
        child.when_lost.atexit = False
        return child

    def _ask(self, command: str, value: Any = None, fds: Sequence[int] = ()) -> Any:
        """The nursery's answer. The clock stands still, so that nothing is broken off between question and answer."""
        with paused(), self._lock:
            try:
                is_sent = self._wire.send(pickle.dumps((command, value)), fds)
                answer = self._wire.receive()[0] if is_sent else None
            except BaseException:
                self._wire.close()  # by Ctrl+C: an answer is outstanding, and would be taken for that to the next one
                raise
        if answer is None:
            raise CallFailed(GONE)
        return pickle.loads(answer)


def _allow_many_files() -> None:
    """Two for each process: 512 episodes at a time are more than most systems allow unasked."""
    import resource  # not on Windows, which has no fork either

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Seat:
    """One process, for one object of the environment's at a time; one thread uses it at a time."""

    def __init__(self, isolation: Isolation, child: _Child, make: Callable[[Any], Any]) -> None:
        self._isolation, self._child = isolation, child
        self._make: Callable[[Any], Any] | None = make
        self._lock = threading.Lock()  # against the thread that ends a call which is just ending
        self._is_calling = self._is_free = False
        self._failure: Failure | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.pid

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the object returns; inside a job, until the job's deadline.

        Raises:
            CallFailed: it raised, hung or crashed; after the latter two, all further calls do.
        """
        if self._is_free:
            raise RuntimeError("this seat was given back")
        request = _pickled((self._make, method, arguments), "was given")
        with self._lock:
            if self._failure is not None:
                raise CallFailed(self._failure)
            self._is_calling = True
        with ended_by(self._end, self._where):
            answer = self._child.wire.receive()[0] if self._child.wire.send(request) else None
        with self._lock:
            self._is_calling = False
        value, failure = self._read(answer)
        if failure is not None:
            raise CallFailed(failure)
        self._make = None
        return value

    def free(self) -> None:
        """Give the process back: the object in it is dropped, and the next lease gets it, unless it is broken."""
        with self._lock:
            was_free, self._is_free = self._is_free, True
        if not was_free:
            self._isolation.take_back(self._child, self._is_calling or self._failure is not None)

    def _read(self, answer: bytes | None) -> tuple[Any, Failure | None]:
        if answer is None or self._failure is not None:
            self._failure = self._failure or self._crashed()
            return None, self._failure
        try:
            value, failure = pickle.loads(answer)
        except Exception as error:
            return None, Failure("wrong_type", f"returned what cannot be passed between processes: {error!r}"[:300])
        return value, failure

    def _crashed(self) -> Failure:
        try:
            return self._isolation.end(self._child)
        except CallFailed as error:
            return error.failure

    def _end(self, failure: Failure) -> None:
        """In the thread that watches the deadlines."""
        with self._lock:
            if self._is_calling:
                self._failure = failure
                self._crashed()

    def _where(self) -> traceback.StackSummary:
        """Ask the process for the line that it is at; it exists, as only `_end` has it waited for."""
        with self._lock:
            if not self._is_calling:
                return traceback.StackSummary()
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, _WHERE)
            return _innermost(self._child.dump())


class _Child:
    """What the training process has of a process."""

    when_lost: weakref.finalize[..., _Child]

    def __init__(self, pid: int, wire: _Wire, where: FileIO, generation: int) -> None:
        self.pid, self.wire, self.generation = pid, wire, generation
        self._where = where

    @property
    def has_ended(self) -> bool:
        """Never end it again: its number may be that of another by now."""
        return not self.when_lost.alive

    def dump(self) -> str:
        """What it writes when it is asked where it is."""
        poll, text, patience = select.poll(), b"", 500
        poll.register(self._where, select.POLLIN)
        while poll.poll(patience) and (part := self._where.read(65536)):
            text, patience = text + part, 10
        return text.decode("ascii", "replace")

    def close(self) -> None:
        """Let go of the lines to it."""
        self.wire.close()
        self._where.close()


class _Wire:
    """Messages over a socket, with file descriptors."""

    def __init__(self, line: socket.socket) -> None:
        self._socket = line

    def send(self, message: bytes, fds: Sequence[int] = ()) -> bool:
        """Whether it could be sent."""
        try:
            socket.send_fds(self._socket, [struct.pack("!Q", len(message))], fds)
            self._socket.sendall(message)
        except OSError:
            return False
        return True

    def receive(self) -> tuple[bytes | None, list[int]]:
        """The next message and its file descriptors; None: the other end is gone."""
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
        """Whether somebody is at the other end, which is to say nothing."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Let the other end know that there is no more to come."""
        self._socket.close()


# -- in the nursery


def _run_nursery(environment: Any, line: socket.socket, close: Sequence[int], parent: int | None) -> None:
    for fd in close:
        with suppress(OSError):
            os.close(fd)
    if parent is not None:
        _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C is for the training process, which ends this one
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _have_no_input()
    gc.freeze()  # memory that is never written to stays shared
    nursery = _Nursery(environment, line)
    try:
        nursery.serve()
    finally:
        nursery.end_all()


class _Nursery:
    def __init__(self, environment: Any, line: socket.socket) -> None:
        self._environment, self._line = environment, line
        self._children: set[int] = set()

    def serve(self) -> None:
        """Until the training process is gone."""
        wire = _Wire(self._line)
        commands: dict[str, Callable[..., Any]] = {"spawn": self._spawn, "reap": self._reap, "update": self._update}
        while (received := wire.receive())[0] is not None:
            command, value = pickle.loads(received[0])
            answer = commands[command](value, received[1])
            for fd in received[1]:
                os.close(fd)
            wire.send(pickle.dumps(answer))

    def end_all(self) -> None:
        """At its own end."""
        for pid in list(self._children):
            self._reap(pid, [])

    def _spawn(self, _: None, fds: Sequence[int]) -> int | str:
        try:
            pid = _fork(partial(_run_child, self._environment, fds, self._line, os.getpid()))
        except OSError as error:
            return str(error)
        with suppress(OSError):  # the child does it too: whoever is first
            os.setpgid(pid, pid)
        self._children.add(pid)
        return pid

    def _reap(self, pid: int, _: Sequence[int]) -> int | None:
        """End a process and what it has started, and say how it ended: it may have ended before."""
        if pid not in self._children:
            return None
        self._children.remove(pid)
        for kill in (os.killpg, os.kill):
            with suppress(OSError):
                kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]

    def _update(self, attributes: dict[str, bytes], _: Sequence[int]) -> Failure | None:
        try:
            vars(self._environment).update({name: pickle.loads(value) for name, value in attributes.items()})
        except Exception as error:
            return failure_of(error)
        return None


# -- in a child


def _run_child(environment: Any, fds: Sequence[int], control: socket.socket, parent: int) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)  # so that what the user's code starts is ended with it
    _die_with(parent)
    control.close()
    line, where = fds
    for fd in fds:
        os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=partial(os.close, fd))  # nobody else speaks for this process
    faulthandler.register(_WHERE, file=where, all_threads=True)
    _reseed()
    _serve(_Wire(socket.socket(fileno=line)), environment)


def _serve(wire: _Wire, environment: Any) -> None:
    made: list[Any] = []
    while (request := wire.receive()[0]) is not None:
        if request:
            wire.send(_answer(made, environment, request))
            _flush()
        else:
            made.clear()


def _answer(made: list[Any], environment: Any, request: bytes) -> bytes:
    try:
        make, method, arguments = pickle.loads(request)
        if not made:
            made.append(finished(make(environment)))
        value = finished(getattr(made[0], method)(*arguments))
        return _pickled((value, None), "returned")
    except BaseException as error:
        return pickle.dumps((None, failure_of(error)))


def _pickled(message: tuple[Any, ...], did: str) -> bytes:
    try:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        kinds = [type(part).__name__ for part in _flat(message) if not _can_be_pickled(part)]
        told = f"{did} a {kinds[0] if kinds else 'tuple'}, which cannot be passed between processes"
        raise CallFailed(Failure("wrong_type", told, traceback.format_exc())) from error


def _flat(message: tuple[Any, ...]) -> list[Any]:
    return [one for part in message for one in (part if isinstance(part, tuple) else [part])]


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:
        return False
    return True


def _reseed() -> None:
    """Children must not all draw the same numbers."""
    random.seed()
    if numbers := sys.modules.get("numpy.random"):
        numbers.seed()


# -- processes


def _fork(body: Callable[[], object]) -> int:
    """A process that does this and nothing else: it ends without what its parent would do at its end."""
    _flush()  # or both would write what is waiting to be written
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


def _die_with(parent: int) -> None:
    """Where the system can: end when the parent ends, whatever runs here; elsewhere, the closed line says it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)


def _have_no_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    sys.stdin = os.fdopen(0, closefd=False)


def _wait_for(pid: int, seconds: float) -> bool:
    """Whether it has ended."""
    until = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def _ended(status: int | None) -> Failure:
    code = os.waitstatus_to_exitcode(status or 0)
    if code >= 0:
        return Failure("crashed", f"crashed: its process exited with code {code}")
    name = signal.Signals(-code).name if -code in list(signal.Signals) else "unknown"
    return Failure("crashed", f"crashed: its process was ended by signal {-code} ({name})")


_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def _innermost(dump: str) -> traceback.StackSummary:
    """Of what faulthandler writes, the thread that runs the user's code: the main one, or that of the loop."""
    threads = sorted(dump.split("\n\n"), key=lambda thread: not thread.startswith("Current"))
    stacks = [_stack(thread) for thread in threads]
    return next((stack for stack in stacks if users_line(stack)), stacks[0])


def _stack(thread: str) -> traceback.StackSummary:
    frames = [(_unescaped(file), int(line), name) for file, line, name in reversed(_FRAME.findall(thread))]
    ours = [place for place, frame in enumerate(frames) if (frame[0], frame[2]) == (__file__, _answer.__name__)]
    del frames[: max(ours, default=-1) + 1]  # from before the fork: whoever started the run
    return traceback.StackSummary.from_list([traceback.FrameSummary(*frame) for frame in frames])


def _unescaped(name: str) -> str:
    return name.encode("ascii").decode("unicode_escape") if "\\" in name else name
