"""Training processes that torchrun, accelerate launch, srun or mpirun started: each becomes the worker by exec.

Before that, the first one of a machine forks the machine's command, which makes the plan and on node 0 chooses the run
folder and shows the run. The command gives each process its command line, the log, the pipe for events and the run
folder's lock over a Unix socket, whose path it writes into the store.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from aitrain.errors import AitrainError, ConfigError, RunFailed
from aitrain.events import BYE, COMMAND_VARIABLE, LAUNCHER_VARIABLE
from aitrain.launch.local_processes import ALL_HAVE_ENDED, Ranks, inherited_files, rank_variables
from aitrain.launch.machine_store import POLL, MachineStore, StoreLostError, join_store, serve_store
from aitrain.launch.machines import LaunchedRank, Nodes, launched_rank, without_ranks
from aitrain.launch.nodes import NodeGroup
from aitrain.options.train import TrainConfig
from aitrain.redaction import RedactedLog

MEET_SECONDS = 600.0
"""Seconds for the launcher's processes to connect."""
SHOWS = ("--dry-run", "--help", "--help-all", "-h")
"""Flags with which `aitrain grpo` trains nothing."""


def start_rank(arguments: list[str]) -> None:
    """Return in the one process of a machine that is its command; the others become training processes. No-op without
    a launcher.

    Raises:
        ConfigError: the launcher started another command than `aitrain grpo`.
    """
    rank = launched_rank()
    if rank is None:
        return
    if arguments[:1] != ["grpo"]:
        if rank.rank > 0:
            sys.exit(ConfigError.exit_code)
        raise ConfigError("Only aitrain grpo runs under torchrun, accelerate launch, srun and mpirun\nStart it once.")
    if not set(SHOWS).isdisjoint(arguments):
        if rank.rank > 0:
            sys.exit(0)
        return
    place = Ranks(rank.local_world, rank.rank - rank.local_rank, rank.world, rank.address, rank.port, rank.has_store)
    os.environ.update(rank_variables(place, rank.rank))  # torch's, whoever started this process
    command = os.fork() if rank.local_rank == 0 else None
    if command != 0:
        _become_worker(rank, command)


def _become_worker(rank: LaunchedRank, command: int | None) -> NoReturn:
    """Wait until the command of this machine says what to execute, and do that."""
    launcher = os.getppid()
    name = f"ranks/{rank.node}"

    def look() -> None:
        if os.getppid() != launcher:
            sys.exit(1)
        if command is not None and (ended := os.waitpid(command, os.WNOHANG))[0]:  # nothing is to be trained
            code = abs(os.waitstatus_to_exitcode(ended[1]))
            with suppress(AitrainError):
                join_store(rank.address, rank.port, seconds=0.0).below(rank.restarts).put(name, {"exit": code})
            sys.exit(code)

    try:
        store = join_store(rank.address, rank.port, MEET_SECONDS, look)
        said = store.below(rank.restarts).wait(name, math.inf, look)
    except (ConfigError, StoreLostError):  # the command has ended, which was the store's server
        look()
        sys.exit(1)
    if "exit" in said:
        sys.exit(said["exit"])
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(said["socket"])
        server.sendall(f"{rank.rank} {os.getpid()}\n".encode())
        text, files, _, _ = socket.recv_fds(server, 1 << 16, 4)
        while piece := server.recv(1 << 16):
            text += piece
    job = json.loads(text)
    variables = {**job["defaults"], **without_ranks(os.environ), **job["variables"], LAUNCHER_VARIABLE: str(launcher)}
    variables |= rank_variables(Ranks(**job["ranks"]), rank.rank)
    if command is not None:
        variables[COMMAND_VARIABLE] = str(command)
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files[:2]]):
        os.dup2(file, number)
    for name, file in zip(job["files"], files[2:], strict=True):
        os.set_inheritable(file, True)
        variables[name] = str(file)
    os.execve(job["command"][0], job["command"], variables)


def open_group(rank: LaunchedRank) -> tuple[NodeGroup, MachineStore]:
    """The machines, in the command of one of them, and the store of all starts of the processes: the first machine runs
    it if the launcher does not.

    Raises:
        ConfigError: the store does not answer, or its port is in use.
    """
    if rank.rank == 0 and not rank.has_store:
        store = serve_store(rank.address, rank.port, is_local=rank.nodes is None)
    else:
        store = join_store(rank.address, rank.port, MEET_SECONDS)
    nodes = rank.nodes or Nodes(1, 0, rank.address, rank.port)
    return NodeGroup(nodes, store.below(rank.restarts)), store


def restarted(config: TrainConfig, rank: LaunchedRank, store: MachineStore) -> TrainConfig:
    """The options of a start; after a restart by the launcher, those that continue in the run folder."""
    folders = (store.below(number).get("folder") for number in reversed(range(rank.restarts)))
    if (found := next(filter(None, folders), None)) is None or rank.rank > 0:
        return config
    path = Path(found["path"])
    place = {"output_dir": str(path.parent), "project_name": path.name}
    return config.model_copy(update={**place, "resume_from_checkpoint": "auto"})


class LaunchedProcesses:
    """The training processes of this machine that a launcher started, in the command of the machine."""

    def __init__(self, rank: LaunchedRank, store: MachineStore, on_exit: Callable[[int, int | None], None]) -> None:
        self.rank, self.store, self.on_exit = rank, store, on_exit
        self.pids: dict[int, int] = {}
        """Process ids by rank."""
        self._said_bye: set[int] = set()
        self._reading, self._writing = os.pipe()
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)

    def start(
        self,
        command: list[str],
        defaults: Mapping[str, str],
        variables: Mapping[str, str],
        ranks: Ranks,
        log: RedactedLog,
        lock: int | None,
        listener: socket.socket | None,
    ) -> None:
        """Give each process what it needs to become a training process.

        Raises:
            RunFailed: one does not ask for it.
        """
        job = {"command": command, "defaults": defaults, "variables": variables, "ranks": asdict(ranks)}
        with tempfile.TemporaryDirectory(prefix="aitrain-") as folder, socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{folder}/ranks")
            server.listen(self.rank.local_world)
            server.settimeout(MEET_SECONDS)
            self.store.put(f"ranks/{self.rank.node}", {"socket": f"{folder}/ranks"})
            while len(self.pids) < self.rank.local_world:
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    raise RunFailed("The processes that the launcher started do not answer") from None
                with connection, connection.makefile() as said:
                    rank, pid = map(int, said.readline().split())
                    files = inherited_files(rank, lock, listener)
                    text = json.dumps({**job, "files": list(files)}).encode()
                    socket.send_fds(connection, [text[:1]], [self._writing, log.pipe.fileno(), *files.values()])
                    connection.sendall(text[1:])
                    self.pids[rank] = pid
        self._watching.start()

    def lines(self) -> Iterator[str]:
        """What they write, until all of them have ended."""
        with open(self._reading, encoding="utf-8", errors="replace") as file:
            for line in iter(file.readline, ALL_HAVE_ENDED):
                if line.startswith(BYE):
                    self._said_bye.add(int(line.removeprefix(BYE)))
                else:
                    yield line

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each of them."""
        for pid in self.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL to each of them; the launcher ends what is left."""
        self.send(signal.SIGKILL)

    def wait(self, seconds: float) -> None:
        """Wait for all of them to end; kill those that have not ended by then."""
        self._watching.join(seconds)
        if self._watching.is_alive():
            self.kill()

    def _watch(self) -> None:
        left = dict(self.pids)
        while left:
            for rank, pid in list(left.items()):
                if rank in self._said_bye or not _is_alive(pid):
                    del left[rank]
                    self.on_exit(rank, 0 if rank in self._said_bye else None)
            time.sleep(POLL)
        with suppress(BrokenPipeError), os.fdopen(self._writing, "wb") as pipe:
            pipe.write(f"\n{ALL_HAVE_ENDED}".encode())


def _is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may not be waited for yet by the launcher."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
