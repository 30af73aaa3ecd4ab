"""`aitrain` for tests whose subject is not how a process starts: the command and its training process are forked from a
server that has imported torch and TRL already, which is most of a short run's time. All else is the real command: its
own processes, standard streams, working directory, environment variables, signals and exit code.

The server is this file, run by the fixture `preloaded_aitrain` once for all processes that run tests; it ends with the
process that started these.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import gc
import importlib
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

MODULES = (
    "aitrain", "aitrain.jobs.worker", "aitrain.ui.output",
    "torch.distributed.run", "benchmarks.plain_trl", "pytest",
)  # fmt: skip
"""Modules that run in forked processes; others are started as usual, such as the process of `env check`, which starts
itself again: faulthandler's watchdog would hang in a fork of a process that has one."""

PRELOADED = (
    "aitrain.cli.running", "aitrain.jobs.grpo", "torch.distributed.run", "psutil",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip

SUPERVISOR = "/aitrain/execution/process_tree.py"
"""The file that runs between the command and its training process."""

TORCHRUN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
"""The module in which torchrun starts processes, by a name of its own for `subprocess.Popen`."""

ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3}
"""Variables that glibc reads when a program starts, with the parameter of mallopt that each stands for."""

HIGH = 1000
"""Lowest number of a copy of a file descriptor."""

SCRIPT = """\
#!{python} -ISE
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
arguments = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
request = {{"arguments": arguments, "folder": os.getcwd(), "variables": dict(os.environ)}}
socket.send_fds(server, [len(text := json.dumps(request).encode()).to_bytes(8, "big")], [0, 1, 2])
server.sendall(text)
answers = server.makefile()
pid = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def no_sync(_: object) -> None:
    """In place of `os.fsync` in tests: it waits for the disk, and only a machine that loses its power needs it."""


def start_server(folder: Path, lives_with: int) -> Path:
    """Run the server as long as a process lives; gives a folder whose `aitrain`, and `preloaded-python -P -m MODULE`,
    are served by it."""
    address, scripts = folder / "socket", folder / "bin"
    scripts.mkdir()
    for name in ("aitrain", "preloaded-python"):
        (scripts / name).write_text(SCRIPT.format(python=sys.executable, address=str(address)))
        (scripts / name).chmod(0o755)
    variables = {**os.environ, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    variables["OMP_WAIT_POLICY"] = "passive"  # read when torch is imported; a run sets it for its own processes
    command = [sys.executable, "-P", __file__, str(address), str(lives_with)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, env=variables, start_new_session=True)
    assert server.stdout.readline() == b"ready\n"
    server.wait()
    return scripts


def serve(address: str, lives_with: int) -> None:
    """Fork a process for each command."""
    ended = os.pidfd_open(lives_with)
    os.fsync = no_sync
    gc.disable()
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    gc.enable()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing waits for the children
        while ended not in select.select([listening, ended], [], [])[0]:
            client, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                _attend(client)
            client.close()


def _attend(client: socket.socket) -> NoReturn:
    """Run a client's command in a child, and send its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, *_ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as file:
        request = json.loads(file.read(int.from_bytes(size, "big")))
    if (pid := os.fork()) == 0:
        os.chdir(request["folder"])
        _become(streams, request["variables"])
        subprocess.Popen = ForkingPopen  # type: ignore[misc]
        os.execve = run_in_place  # type: ignore[assignment]
        sys.modules[TORCHRUN].Popen = ForkingPopen  # type: ignore[attr-defined]
        name, *arguments = request["arguments"]
        _run(*arguments[2:] if name == "preloaded-python" else ("aitrain", *arguments))
    client.sendall(f"{pid}\n".encode())
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(pid)
    if client.fileno() in select.select([client.fileno(), ended], [], [])[0]:  # the client was killed
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    client.sendall(f"{code}\n".encode())
    os._exit(0)


class ForkingPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` that forks where it would start Python with one of MODULES, or with the supervisor of one."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        words = list(itertools.dropwhile(lambda word: word.startswith("-"), args[1:]))
        if args[0] != sys.executable or not words or not (words[0] in MODULES or words[0].endswith(SUPERVISOR)):
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        prepare, closes, kept, folder, variables = rest[1:6]
        pipes, is_new_session = rest[9:15], rest[20]
        if not closes:
            kept = _inheritable()
        # a fork drops the locks of its parent, and libuv of torch's store closes low numbers that it used there
        copies = {fd: fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in kept}
        faulthandler.cancel_dump_traceback_later()  # whose thread a fork does not have; env check asks for it again
        self.pid = os.fork()
        if self.pid == 0:
            _forget_interrupted_imports()
            if is_new_session:
                os.setsid()
            if folder is not None:
                os.chdir(folder)
            _become([pipes[0], pipes[3], pipes[5]], variables, copies)
            if prepare is not None:
                prepare()
            _run(*words)
        for copy in copies.values():
            os.close(copy)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run_in_place(_: str, arguments: list[str], variables: dict[str, str]) -> NoReturn:
    """In place of `os.execve`, with which a launcher's process becomes one of MODULES."""
    _become([0, 1, 2], variables, {number: number for number in _inheritable()})
    _run(*arguments[arguments.index("-m") + 1 :])


def _inheritable() -> list[int]:
    """The file descriptors that a new process gets, without the standard streams."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    return [number for number in numbers if os.path.exists(f"/proc/self/fd/{number}") and os.get_inheritable(number)]


def _forget_interrupted_imports() -> None:
    """Forget the modules that another thread was importing: it does not exist after the fork, and holds their locks."""
    for name, module in list(sys.modules.items()):
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            del sys.modules[name]
    importlib._bootstrap._module_locks.clear()  # type: ignore[attr-defined]


def _become(
    streams: list[int], variables: dict[str, str] | None, kept: Mapping[int, int] = MappingProxyType({})
) -> None:
    """Take over standard streams, environment variables and signals as a new process has them; close all else, except
    copies of file descriptors to keep under their own number."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders are the parent's
    copies = [os.dup(number if stream == -1 else stream) for number, stream in enumerate(streams)]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    for number, copy in kept.items():
        os.dup2(copy, number)
    first = 3
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, 1 << 16)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    if variables is not None:
        os.environ.clear()
        os.environ.update(variables)
        for name in ALLOCATOR.keys() & variables.keys():
            ctypes.CDLL(None).mallopt(ALLOCATOR[name], int(variables[name]))
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _run(module: str, *arguments: str) -> NoReturn:
    """Run a module, or a file, to its end, and exit as Python would."""
    ctypes.CDLL(None).prctl(15, module[-15:].encode())  # its name in /proc/PID/comm
    sys.argv = [module, *arguments]
    code: object = 0
    try:
        if module.endswith(".py"):
            sys.path.insert(0, str(Path(module).absolute().parent))
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=False)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__" and os.fork() == 0:
    # no child of the process that runs tests: a check for processes that an environment leaves would find all runs here
    serve(sys.argv[1], int(sys.argv[2]))
