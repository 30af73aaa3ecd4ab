"""Starts, watches and ends the training processes of a run on this machine: one for each rank.

The first Ctrl-C or SIGTERM makes the training processes finish their step and save; a second one kills them. Compared
with torchrun a start takes a second less, a rank that is killed is known by its number and signal, and nothing waits
for a rendezvous that is gone.
"""

import mmap
import os
import signal
import socket
import sys
import tempfile
import threading
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from aitrain.activity import SLOT, Snapshot, read
from aitrain.activity import VARIABLE as ACTIVITY_VARIABLE
from aitrain.errors import Interrupted, RunFailed
from aitrain.events import BYE, STORE_VARIABLE, Announce, Ended, Event, Failed, Phase, decode
from aitrain.execution.process_tree import ProcessTree, on_stop_signals
from aitrain.launch.launched_ranks import LaunchedProcess, hand_over
from aitrain.launch.machines import LaunchedRank, without_ranks
from aitrain.launch.managed_server import managed_server
from aitrain.launch.model_shape import is_small
from aitrain.launch.nodes import MachineStore, NodeGroup, State, interface_variables, store_on
from aitrain.launch.preflight import RunPlan
from aitrain.machine import usable_cores
from aitrain.redaction import RedactedLog, disable_telemetry
from aitrain.runs.heartbeat import NodeInfo
from aitrain.runs.new_folder import LOCK_VARIABLE
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.watchdog import Watchdog, ask_for_stacks, waits_for_another_rank

PYTHON = [sys.executable, "-P"]
"""`-P` keeps the working directory off the path: a folder named `vllm` there must not hide the library."""
WORKER = "aitrain.jobs.worker"
ALL_HAVE_ENDED = "\0\n"
"""The last line of the processes' output, which is ours."""
PATIENCE = 60.0
"""Seconds that a process gets to exit after it reported its end."""
AFTER_FAILURE = 10.0
"""The same after the failure of one of several ranks: the others may hang, and have nothing to finish."""
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that end one rank and make the others fail; SIGABRT is how NCCL ends the others."""
LOOK_SECONDS = 5.0
"""Seconds, beyond those in which a machine is silent, to wait for the cause of a failure."""
STOPPING = "stopping after this step; Ctrl-C again ends it at once"


@dataclass
class Processes:
    """The training processes of one run on this machine, in their parent."""

    plan: RunPlan
    folder: RunFolder
    announce: Announce
    group: NodeGroup | None = None
    """The machines of the run; also of one machine whose processes another launcher started."""
    ranks: list[LaunchedRank] = field(default_factory=list)
    """The processes of this parent; where Ray has not decided on them, all of this machine."""
    node: int = 0
    """Number of this machine."""
    machines: list[NodeInfo] = field(default_factory=list)
    """All machines of the run, if there are several."""
    variables: dict[str, str] = field(default_factory=dict)
    """Further environment variables."""
    trees: dict[int, ProcessTree | LaunchedProcess] = field(default_factory=dict)
    """The processes by rank, each with all that it has started."""
    last: Failed | Ended | None = None
    stops: int = 0
    lost: Failed | None = None
    """Exit of the first process that ended by itself and reported no error."""
    watchdog: Watchdog | None = None
    listener: socket.socket | None = None
    """Socket of torch's store, which rank 0 runs, if this process starts all ranks."""
    store: MachineStore | None = None
    """Store of this process, which all ranks use, if there is no listener."""
    activity: IO[bytes] | None = None
    """The memory with phases and progress counts, written by the training processes; a file without a name, of which
    nothing is left whoever is killed."""
    cause: Failed | None = None
    """The loss of a machine or a process, which explains the errors of the ranks."""
    is_started: bool = False
    """Whether Ctrl-C ends the processes through `trees`; before, it interrupts this one."""
    _is_killed: bool = False
    _signals: int = 0
    """How often a signal has asked this process to stop."""

    def __post_init__(self) -> None:
        if self.group is not None:
            self.node, self.machines = self.group.nodes.rank, self.group.infos

    def run(self) -> Failed | Ended:
        """Start the processes, announce their events, and wait for the last one to exit.

        Returns the first failure, or how the run ended.
        """
        disable_telemetry()
        if self.plan.launched is not None:
            # after a failure the launcher ends all processes, this one before its caller has shown why
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with ExitStack() as stack:
            stack.enter_context(on_stop_signals(self._on_signal))
            if self.group is not None:
                self.group.on_state, self.group.on_lost = self._on_state, self._on_lost
                if self.group.lost:
                    self._on_lost(self.group.lost)
            if not self.ranks:
                self._prepare(stack)
            if isinstance(self.last, Failed):  # another machine has
                return self._end()
            numbers = [rank.rank for rank in self.ranks]
            # in memory where that is possible: writing to a full or lost disk would end or block the processes
            in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            self.activity = stack.enter_context(tempfile.TemporaryFile(dir=in_memory))
            self.activity.write(bytes(SLOT * self.world))  # allocates it
            self.activity.flush()
            seconds, look = self.plan.config.stall_timeout, partial(read, mmap.mmap(self.activity.fileno(), 0))
            self.watchdog = Watchdog(seconds, numbers, self.world, look, self._on_stall, self._waits)
            self.watchdog.start()
            stack.callback(self.watchdog.stop)
            log = stack.enter_context(closing(RedactedLog(self.log, self._environment())))
            reading, writing = os.pipe()
            waiting = list[threading.Thread]()
            try:
                self._start(log, writing)
                for rank, tree in self.trees.items():
                    waiting.append(threading.Thread(target=self._wait, args=[rank, tree], daemon=True))
                    waiting[-1].start()
                threading.Thread(target=_write_last_line, args=[writing, waiting], daemon=True).start()
                self.is_started = True
                if self.stops or self._is_killed:  # a signal, another thread or machine asked before all were started
                    self._send(signal.SIGKILL if self._is_killed else signal.SIGTERM)
                with open(reading, encoding="utf-8", errors="replace") as file:
                    for line in iter(file.readline, ALL_HAVE_ENDED):  # what cannot be ended may keep the pipe open
                        if line.startswith(BYE):
                            launched = self.trees[int(line.removeprefix(BYE))]
                            assert isinstance(launched, LaunchedProcess)
                            launched.has_left.set()
                        elif (event := decode(line)) is not None:
                            self._hear(event)
            except BaseException:
                self._send(signal.SIGKILL)
                raise
            finally:
                for thread in waiting:
                    thread.join()
                log.close()
            return self._end()

    @property
    def world(self) -> int:
        """Number of all ranks."""
        return self.ranks[0].world if self.ranks else self.plan.batch.processes

    @property
    def log(self) -> Path:
        """Where the processes of this machine write what libraries and the environment print: several machines cannot
        append to one file of a network file system."""
        return self.folder.path / f"train-node{self.node}.log" if self.node else self.folder.log

    def _prepare(self, stack: ExitStack) -> None:
        """Start what the processes need, and decide on their ranks. Other machines wait until node 0 is ready."""
        count, world = self.plan.processes, self.plan.batch.processes
        address, port = "127.0.0.1", 0
        if self.node == 0:
            self.variables |= stack.enter_context(managed_server(self.plan, self.folder, self.announce))
            if world > 1:
                place = "" if self.machines else address, 0
                listener = stack.enter_context(socket.create_server(place, backlog=world))
                port = listener.getsockname()[1]
                if self.group is None:
                    self.listener = listener
                else:
                    self.store = store_on(listener)
        if self.group is not None and self.machines:
            address = self.machines[0].address
            if self.node == 0:
                self.group.say(begin=port)
            else:
                port = self.group.hear(0, "begin")
        first = count * self.node
        self.ranks = [LaunchedRank(first + n, world, n, count, address, port, has_store=True) for n in range(count)]

    def _start(self, log: RedactedLog, writing: int) -> None:
        """Start one process for each rank. All write events to the same pipe; those that are started here inherit the
        lock of the run folder.

        Each is in a session of its own, so that Ctrl-C reaches only the parent, which forwards it; if the parent is
        killed, they finish their step, save and leave, or are ended as a run that stalls.
        """
        command, first = self._command(), self.ranks[0]
        if self.group is not None and self.plan.launched is not None:
            files_here = f"/proc/{os.getpid()}/fd"
            job = {
                "command": command,
                "defaults": self._defaults(),
                "variables": self._added(files_here),
                "address": first.address,
                "port": first.port,
                "pipes": [f"{files_here}/{file}" for file in (writing, log.pipe.fileno())],
            }
            self.trees |= hand_over(self.ranks, self.node, self.group.store, job)
            return
        self.is_started = True  # interrupted, it would leave a process that is in no tree
        for rank in self.ranks:
            files = {} if self.folder.lock is None else {LOCK_VARIABLE: self.folder.lock}
            if self.listener is not None and rank is first:
                files[STORE_VARIABLE] = self.listener.fileno()
            numbers = {name: str(file) for name, file in files.items()}
            shared = [self.activity.fileno()] if self.activity else []
            self.trees[rank.rank] = ProcessTree(
                command,
                self.plan.config.stall_timeout,
                env={**self._environment(), **rank.variables, **numbers},
                stdout=writing,
                stderr=log.pipe,
                pass_fds=[*files.values(), *shared],
            )

    def _command(self) -> list[str]:
        """The command of a training process; all ranks have the same one."""
        command = [*PYTHON, "-m", WORKER, str(self.folder.path), str(self.folder.epoch)]
        if checkpoint := self.plan.checkpoint:
            command += [str(checkpoint), *(["anyway"] if self.plan.config.resume_anyway else [])]
        return command

    def _environment(self) -> dict[str, str]:
        return {**self._defaults(), **without_ranks(), **self._added()}

    def _defaults(self) -> dict[str, str]:
        """The variables that the user may have set otherwise."""
        interface = interface_variables(self.machines[self.node].address) if self.machines else {}
        share, has_gpus = max(1, usable_cores() // self.plan.processes), bool(self.plan.gpus)
        return {
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONHASHSEED": "0",  # the order of sets is the same in every run and on every rank
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take the cores from each other, and from other programs
            "OMP_NUM_THREADS": "1" if not has_gpus and is_small(self.plan.config.model) else str(share),
            **interface,
        }

    def _added(self, open_files: str = "/dev/fd") -> dict[str, str]:
        """What this run adds to the variables of the command, for a process that has the open files of this one in this
        folder."""
        activity = {ACTIVITY_VARIABLE: f"{open_files}/{self.activity.fileno()}"} if self.activity else {}
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self.plan.gpus)} if self.plan.gpus else {}  # the plan chose them
        return {**gpus, **activity, **self.variables}

    def _hear(self, event: Event) -> None:
        if isinstance(event, (Failed, Ended)):
            self._remember(event)
        self.announce(event)

    def _remember(self, event: Failed | Ended, said: State | None = None) -> None:
        """Keep the first failure, as the others follow from it; kill processes that do not exit in time."""
        if self.last is None:
            self.last = event
            self._say_end(event, said)
            if self.watchdog is not None:
                self.watchdog.stop()
            self._kill_in(PATIENCE if self.world == 1 or isinstance(event, Ended) else AFTER_FAILURE)

    def _kill_in(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True
        timer.start()

    # -- hangs

    def _waits(self, rank: int, seen: Snapshot) -> bool:
        """Whether a stalled rank waits for another rank, by its stacks, which go to train.log."""
        if seen.phase:  # else it has not begun, and would be killed by the signal
            with suppress(OSError):  # the log cannot be written: the run is ended without the stacks
                return waits_for_another_rank(ask_for_stacks(self.log, rank, self.trees[rank].send, seen))
        return False

    def _on_stall(self, message: str) -> None:
        """Called in the watchdog's thread."""
        if self.last is None:
            self._remember(Failed(message, RunFailed.exit_code, "stalled"))
            self._kill()

    # -- ending

    def _on_signal(self, *_: object) -> None:
        if not self.is_started:
            raise KeyboardInterrupt  # while vLLM is being started
        self._signals += 1
        self.stop(self._signals)

    def stop(self, times: int = 1) -> None:
        """Ask the training processes to finish their step, save and leave; asked a second time, kill them. For any
        thread. `times`: how often one machine was asked, as a scheduler signals all of them."""
        if times <= self.stops:
            return
        self.stops = times
        if self.group is not None:
            self.group.say(stops=times)
        if times > 1:
            self._kill()
            return
        # in a thread, as this one may be announcing an event already
        threading.Thread(target=self.announce, args=[Phase(STOPPING)], daemon=True).start()
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        """Send a signal to each process; SIGKILL also to all that they have started."""
        for tree in list(self.trees.values()):
            tree.send(number)

    def _kill(self) -> None:
        self._is_killed = True
        self._send(signal.SIGKILL)

    def _wait(self, rank: int, tree: ProcessTree | LaunchedProcess) -> None:
        """Wait for a process, in a thread. If it was not ended by us, the others would wait for it."""
        code = tree.wait()
        if code != 0 and not self._is_killed:
            died = self._how_it_ended(rank, code)
            if self.lost is None:
                self.lost = died
                if code is None or -code in CRASHES:  # else it may be a consequence
                    self.cause = self.cause or died
            if code is not None and code < 0 and self.last is None and not self.stops:
                self._say_end(died, is_cause=True)
            if self.world > 1 and self.last is None:
                self._kill_in(PATIENCE if code is not None and code > 0 else 0.0)  # its error may still be in the pipe

    def _how_it_ended(self, rank: int, code: int | None) -> Failed:
        """`Rank 1 of 2 ended without an error message: SIGKILL (out of memory?)`, from an exit code, which only its
        launcher may know."""
        who = "The training process" if self.world == 1 else f"Rank {rank} of {self.world}"
        how = "see the output of its launcher" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            causes = {
                signal.SIGKILL: " (out of memory?)",
                signal.SIGABRT: " (NCCL, after --ddp-timeout? See train.log)",
            }
            how = signal.Signals(-code).name + causes.get(signal.Signals(-code), "")
        text = f"{who} ended without an error message: {how}"
        if code != -signal.SIGKILL and self.plan.config.rl_env_isolation == "thread":
            text += "\nIf the environment's code ended it: with --rl-env-isolation process the training continues."
        return Failed(text, RunFailed.exit_code)

    def _end(self) -> Failed | Ended:
        """How the run ended. Where a rank was killed, or a machine lost, the others failed because of that."""
        if self.group is not None and self.machines:
            if self.node > 0 and self.last is None and self.lost is None and not self._is_killed:
                self.group.wait_for_others(PATIENCE, lambda: self.last is not None)
            elif not isinstance(self.last, Ended):  # a lost machine is named in time
                self.group.wait_for_others(self.group.silence + LOOK_SECONDS, lambda: self.cause is not None)
            elif self.node == 0:
                self.group.wait_for_others(PATIENCE)
        is_failure = isinstance(self.last, Failed) and self.last.exit_code == RunFailed.exit_code
        if self.last is not None and not (is_failure and self.cause):
            return self.last
        if self.stops:
            return Failed("Stopped.", Interrupted.exit_code)
        return self.cause or self.lost or self._how_it_ended(min(self.trees, default=0), 0)

    # -- other machines

    def _say_end(self, event: Failed | Ended, said: State | None = None, is_cause: bool = False) -> None:
        """Tell the other machines how the run ended, or that a process was killed, which is the cause of all else."""
        if self.group is not None and (self.node == 0 or isinstance(event, Failed)):
            self.group.say(end=said or {**asdict(event), "node": self.node, "is_cause": is_cause})

    def _on_state(self, rank: int, state: State) -> None:
        """Called again and again, in a thread, with what another machine says of itself."""
        assert self.group is not None
        if (times := state.get("stops", 0)) > self.stops:
            self.stop(times)
        if end := state.get("end"):
            self._hear_end(end)
        elif state.get("over") and self.last is None and self.lost is None and not self.stops:
            self._on_lost(f"{self.group.name(rank)} ended")

    def _hear_end(self, end: State) -> None:
        """Node 0 hears of failures elsewhere; the others hear from node 0 how the run ended, on whichever machine."""
        assert self.group is not None
        if "step" in end:
            self._remember(Ended(end["status"], end["step"], end["because"]))
            return
        failed = Failed(self.group.message_of(end), end["exit_code"], end["status"])
        if end["node"] != self.node and (end["is_cause"] or self.node > 0):
            self.cause = self.cause or failed
        if self.last is None and self.node == 0:
            self.announce(failed)
        self._remember(failed, end)
        if end["is_cause"] and not self._is_killed:
            self._kill()

    def _on_lost(self, why: str) -> None:
        """A machine is gone: no collective operation of ours can end."""
        if not isinstance(self.last, Ended):
            self.cause = self.cause or Failed(why, RunFailed.exit_code)
            self._remember(self.cause)
            self._kill()


def _write_last_line(pipe: int, waiting: list[threading.Thread]) -> None:
    for thread in waiting:
        thread.join()
    with suppress(BrokenPipeError), os.fdopen(pipe, "wb") as opened:
        opened.write(f"\n{ALL_HAVE_ENDED}".encode())
