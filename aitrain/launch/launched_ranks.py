"""Training processes that torchrun, accelerate launch, srun or mpirun started: each becomes the worker by exec.

Before that, the first one of a machine forks the machine's command, which makes the plan and on node 0 chooses the run
folder and shows the run. The command writes command line, variables and the places of its pipes into a file, whose
path is in the store; opened by their place in /proc, the pipes are those of the command.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from aitrain.errors import AitrainError, ConfigError, RunFailed
from aitrain.events import COMMAND_VARIABLE, LAUNCHER_VARIABLE
from aitrain.launch.machines import LaunchedRank, Nodes, launched_rank, without_ranks
from aitrain.launch.nodes import POLL, MachineStore, NodeGroup, join_store, open_store
from aitrain.machine import PROC
from aitrain.options.train import TrainConfig

MEET_SECONDS = 600.0
"""Seconds for the launcher's processes to connect."""
SHOWS = ("--dry-run", "--help", "-h")
"""Flags with which `aitrain grpo` trains nothing."""


# -- in a process of the launcher


def start_rank(arguments: list[str]) -> None:
    """Return in the one process of a machine that is its command; the others become training processes. No-op without
    a launcher.

    Raises:
        ConfigError: the launcher started another command than `aitrain grpo`, or the system has no /proc.
    """
    rank = launched_rank()
    if rank is None:
        return
    refusal, is_shown = "", not set(SHOWS).isdisjoint(arguments)
    if arguments[:1] != ["grpo"]:
        refusal = "Only aitrain grpo runs under torchrun, accelerate launch, srun and mpirun\nStart it once."
    elif not is_shown and not PROC.is_dir():
        refusal = "torchrun and other launchers need /proc, which Linux has\nUse --num-processes in their place."
    if rank.rank > 0 and (refusal or is_shown):
        sys.exit(ConfigError.exit_code if refusal else 0)
    if refusal:
        raise ConfigError(refusal)
    if is_shown:
        return
    os.environ.update(rank.variables)  # torch's, whoever started this process
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
            with suppress(AitrainError, RuntimeError):
                join_store(rank.address, rank.port, seconds=0.0).below(rank.restarts).put(name, {"exit": code})
            sys.exit(code)

    try:
        store = join_store(rank.address, rank.port, MEET_SECONDS, look).below(rank.restarts)
        while (said := store.get(name)) is None:
            look()
            time.sleep(POLL)
    except (ConfigError, RuntimeError):  # the command has ended, which was the store's server
        look()
        sys.exit(1)
    if "exit" in said:
        sys.exit(said["exit"])
    job = json.loads(Path(said["job"]).read_text(encoding="utf-8"))
    place = replace(rank, address=job["address"], port=job["port"], has_store=True)
    variables = {**job["defaults"], **without_ranks(), **job["variables"], **place.variables}
    variables[LAUNCHER_VARIABLE] = str(launcher)
    if command is not None:
        variables[COMMAND_VARIABLE] = str(command)
    for number, path in enumerate([os.devnull, *job["pipes"]]):
        os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
    store.put(f"pids/{rank.rank}", os.getpid())
    os.execve(job["command"][0], job["command"], variables)


# -- in the command of a machine


def open_group(config: TrainConfig, rank: LaunchedRank) -> tuple[NodeGroup, TrainConfig]:
    """The machines, in the command of one of them, and the options of this start: after a restart by the launcher,
    those that continue in the run folder. The first machine runs the store if the launcher does not.

    Raises:
        ConfigError: the store does not answer, or its port is in use.
    """
    nodes = rank.nodes or Nodes(1, 0, rank.address, rank.port)
    store = open_store(nodes, MEET_SECONDS, rank.has_store)
    group = NodeGroup(nodes, store.below(rank.restarts))
    folders = (store.below(number).get("folder") for number in reversed(range(rank.restarts)))
    if (found := next(filter(None, folders), None)) is None or rank.rank > 0:
        return group, config
    path = Path(found)
    place = {"output_dir": str(path.parent), "project_name": path.name}
    return group, config.model_copy(update={**place, "resume_from_checkpoint": "auto"})


class LaunchedProcess:
    """A training process that a launcher started; the part of a ProcessTree that a run needs."""

    def __init__(self, pid: int) -> None:
        self.pid, self.has_left = pid, threading.Event()
        """Set when it has said that it has ended."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process; the launcher ends what is left."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self) -> int | None:
        """Wait for its end; returns 0, or None if it has not said that it ends: only the launcher knows its code."""
        while not self.has_left.wait(POLL) and _runs(self.pid):
            pass
        return 0 if self.has_left.wait(POLL) else None


def _runs(pid: int) -> bool:
    """Whether a process has not ended; a zombie, which its launcher has not waited for, has."""
    import psutil  # here, as only this needs it

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def hand_over(
    ranks: Sequence[LaunchedRank], node: int, store: MachineStore, job: Mapping[str, Any]
) -> dict[int, LaunchedProcess]:
    """Let each process of this machine become a training process, by a file, which may hold a key; the job has command
    and variables, the pipes for events and the log, and the address and port of torch's store.

    Raises:
        RunFailed: one does not.
    """
    processes, deadline = dict[int, LaunchedProcess](), time.monotonic() + MEET_SECONDS
    with tempfile.NamedTemporaryFile("w", prefix="aitrain-", suffix=".json", encoding="utf-8") as file:
        json.dump(job, file)
        file.flush()
        store.put(f"ranks/{node}", {"job": file.name})
        for rank in ranks:
            while (pid := store.get(f"pids/{rank.rank}")) is None:
                if time.monotonic() > deadline:
                    raise RunFailed("The processes that the launcher started do not answer")
                time.sleep(POLL)
            processes[rank.rank] = LaunchedProcess(pid)
    return processes
