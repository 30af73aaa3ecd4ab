"""Starts, watches and ends the training processes of a run.

The first Ctrl-C or SIGTERM makes the training processes finish their step and save; a second one kills them.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

from aitrain.activity import VARIABLE as ACTIVITY_VARIABLE
from aitrain.activity import SharedMemory, Snapshot, read
from aitrain.errors import AitrainError, Interrupted, RunFailed
from aitrain.events import Announce, Ended, Event, Failed, Note, Phase, Started, decode
from aitrain.launch.launched_ranks import LaunchedProcesses
from aitrain.launch.local_processes import LocalProcesses, Ranks, how_it_ended, worker_command
from aitrain.launch.machines import without_ranks
from aitrain.launch.managed_server import managed_server
from aitrain.launch.model_shape import is_small
from aitrain.launch.nodes import SEES_WITHIN, NodeGroup, State, interface_variables, look_again
from aitrain.launch.preflight import RunPlan
from aitrain.launch.stop_signals import on_stop_signals
from aitrain.launch.system_recorder import SystemRecorder
from aitrain.machine import usable_cores
from aitrain.redaction import RedactedLog, disable_telemetry
from aitrain.runs import node_info
from aitrain.runs.node_info import NodeInfo
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.runs.watchdog import Stall, Watchdog, ask_for_stacks, message, waits_for_another_rank

PATIENCE = 60.0
"""Seconds that a process gets to exit after it reported its end."""
AFTER_FAILURE = 10.0
"""The same after the failure of one of several ranks: the others may hang, and have nothing to finish."""
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that end one rank and make the others fail; SIGABRT is how NCCL ends the others."""
TIMED_OUT = re.compile(r"Rank (\d+) timed out [^.\n]*")
"""What a rank says that waited for another one (training/distributed.py)."""
SECRET = ".servers.json"
"""File in the run folder by which other machines get address and key of the run's vLLM servers, for its owner only."""
LOOK_SECONDS = 5.0
"""Seconds, beyond those in which a machine is silent, to wait for the cause of a failure."""
STOPPING = "stopping after this step; Ctrl-C again ends it at once"


class StartedProcesses(Protocol):
    """The training processes of this machine, whoever started them."""

    def lines(self) -> Iterator[str]:
        """What they write, until all of them have ended."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each of them."""

    def kill(self) -> None:
        """End each of them at once."""

    def wait(self, seconds: float) -> None:
        """Wait for all of them to end; end those that have not ended by then."""


@dataclass
class Processes:
    """The training processes of one run, in their parent."""

    plan: RunPlan
    folder: RunFolder
    announce: Announce
    group: NodeGroup | None = None
    """The machines of the run; also of one machine whose processes another launcher started."""
    checkpoint: Path | None = None
    """Where the training continues from."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process ids by rank."""
    last: Failed | Ended | None = None
    stops: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    local: StartedProcesses | None = None
    lost: tuple[int, int | None] | None = None
    """Rank and exit code of the first process that ended with an error and was not ended by us."""
    server: dict[str, str] = field(default_factory=dict)
    """Environment variables with address and key of the run's own vLLM servers."""
    watchdog: Watchdog | None = None
    listener: socket.socket | None = None
    """On which rank 0 runs torch's store, on one machine."""
    activity: SharedMemory | None = None
    """Phases and progress counts, written by the training processes."""
    cause: Failed | None = None
    """The loss of a machine or of a process of another one, which explains the errors of the ranks."""
    _is_killed: bool = False
    _decided: threading.Event = field(default_factory=threading.Event)
    """Set when it is known how the run ended."""

    def run(self) -> Failed | Ended:
        """Start the processes, announce their events, and wait for the last one to exit.

        Returns the first failure, or how the run ended.
        """
        disable_telemetry(self.plan.config.telemetry)
        with ExitStack() as stack:
            stack.enter_context(on_stop_signals(self._on_signal))
            if self.group is not None:
                stack.push(self._leave)
                self.group.on_state, self.group.on_lost = self._on_state, self._on_lost
                self._check_others()
            self._prepare(stack)
            stack.enter_context(self._watched())
            stack.enter_context(SystemRecorder(self.system))
            log = stack.enter_context(RedactedLog(self.log, self._environment()))
            self.local = self._start(log)
            if self.stops:  # another thread asked while vLLM was being started
                self.local.send(signal.SIGTERM)
            if self._is_killed:  # likewise, or another machine failed
                self.local.kill()
            try:
                for line in self.local.lines():
                    if (event := decode(line)) is not None:
                        self._hear(event)
            finally:
                self.local.wait(PATIENCE)
                log.close()
                self.pids.clear()
            return self._end()

    @property
    def node(self) -> int:
        """Number of this machine."""
        return 0 if self.group is None else self.group.nodes.rank

    @property
    def machines(self) -> list[NodeInfo]:
        """All machines of the run, if there are several."""
        return self.group.infos if self.group else []

    @property
    def log(self) -> Path:
        """Where the processes of this machine write what libraries and the environment print: several machines cannot
        append to one file of a network file system."""
        return self.folder.path / f"train-node{self.node}.log" if self.node else self.folder.log

    @property
    def system(self) -> Path:
        """Where the use of this machine is recorded."""
        return self.folder.system_of(self.node) if self.node else self.folder.system

    def _prepare(self, stack: ExitStack) -> None:
        """Start what the processes need, and decide on their ranks."""
        count, world = self.plan.processes, self.plan.batch.processes
        others = self.group.others if self.group else []
        port = 0
        if self.node == 0:
            if others:
                assert self.group is not None
                self.folder.write_status("running", nodes=node_info.as_json(self.group.infos))
            self.server = stack.enter_context(managed_server(self.plan, self.folder, self.announce))
            if world > 1:
                self.listener = stack.enter_context(
                    socket.create_server(("" if others else "127.0.0.1", 0), backlog=world)
                )
                port = self.listener.getsockname()[1]
        if others:
            port = self._begin(stack, port)
        address = self.group.infos[0].address if self.group and others else "127.0.0.1"
        self.ranks = Ranks(count, count * self.node, world, address, port, has_store=True)

    def _begin(self, stack: ExitStack, port: int) -> int:
        """Begin on all machines: the others wait until node 0 is ready. Returns the port of torch's store."""
        assert self.group is not None
        secret = self.folder.path / SECRET
        if self.node == 0:
            with open(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
                json.dump(self.server, file)  # the store is open to the network
            stack.callback(secret.unlink, missing_ok=True)
            self.group.store.put("begin", port)
            return port
        port = self.group.store.wait("begin", math.inf, self._check_others)
        deadline = time.monotonic() + SEES_WITHIN
        while not secret.exists() and time.monotonic() < deadline:
            look_again(self.folder.path)
            time.sleep(0.1)
        self.server = {name: str(value) for name, value in read_object(secret).items()}
        return port

    def _start(self, log: RedactedLog) -> StartedProcesses:
        if self.group is not None and self.plan.launched is not None:
            launched = LaunchedProcesses(self.plan.launched, self.group.store, self._on_exit)
            place = self.ranks, log, self.folder.lock, self.listener
            launched.start(self._command(), self._defaults(), self._added(), *place)
            return launched
        local = LocalProcesses(self._on_exit)
        local.start(self._command(), self._environment(), self.ranks, log, self.folder.lock, self.listener)
        return local

    def _command(self) -> list[str]:
        return worker_command(self.plan, self.folder, self.checkpoint or self.plan.checkpoint)

    def _environment(self) -> dict[str, str]:
        return {**self._defaults(), **without_ranks(os.environ), **self._added()}

    def _defaults(self) -> dict[str, str]:
        """The variables that the user may have set otherwise."""
        interface = interface_variables(self.machines[self.node].address) if self.machines else {}
        return {**default_variables(self.plan), **interface}

    def _added(self) -> dict[str, str]:
        """What this run adds to the variables of the command."""
        activity = {ACTIVITY_VARIABLE: str(self.activity.path)} if self.activity else {}
        nodes = {node_info.VARIABLE: json.dumps(node_info.as_json(self.machines))} if self.machines else {}
        return {**gpu_variables(self.plan), **self.server, **activity, **nodes}

    def _hear(self, event: Event) -> None:
        if isinstance(event, Started):
            self.pids[event.rank] = event.pid
            if self.activity is not None and len(self.pids) == len(list(self.ranks)):
                self.activity.unlink()  # all have opened it: no file is left if this process is killed
        elif isinstance(event, Failed):
            event = self._explain_timeout(event)
            self._remember(event)
        elif isinstance(event, Ended):
            self._remember(event)
        self.announce(event)

    def _explain_timeout(self, event: Failed) -> Failed:
        """Name the rank that another one waited for in vain, which only this process can see."""
        found = TIMED_OUT.match(event.message)
        hung = self.watchdog.waited_for(int(found[1])) if found and self.watchdog else None
        if found is None or hung is None:
            return event
        phase = hung.seen.name if hung.seen else "starting"
        why = f"{found[0]}: rank {hung.rank} made no progress for {hung.idle.seconds:.0f} seconds ({phase})"
        return replace(event, message=why + event.message[found.end() :])

    def _remember(self, event: Failed | Ended) -> None:
        """Keep the first failure, as the others follow from it; kill processes that do not exit in time."""
        if self.last is None:
            self.last = event
            self._say_end(event)
            self._decided.set()
            if self.watchdog is not None:
                self.watchdog.stop()
            is_alone = self.ranks.world == 1
            self._kill_in(PATIENCE if is_alone or isinstance(event, Ended) else AFTER_FAILURE)

    def _kill_in(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True
        timer.start()

    # -- hangs

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """End the run if it makes no progress."""
        self.activity = shared = SharedMemory(self.ranks.world)
        seconds, look = self.plan.config.stall_timeout, partial(read, shared.memory)
        self.watchdog = Watchdog(seconds, list(self.ranks), look, self._on_stall, self.pids, self._waits)
        self.watchdog.are_all = len(list(self.ranks)) == self.ranks.world
        try:
            with self.watchdog:
                yield
        finally:
            shared.unlink()

    def _waits(self, rank: int, seen: Snapshot) -> bool:
        """Whether a stalled rank waits for another rank, by its stacks, which go to train.log."""
        pid = self.pids.get(rank)
        if pid is not None:
            with suppress(OSError):  # the log cannot be written: the run is ended without the stacks
                return waits_for_another_rank(ask_for_stacks(self.log, rank, pid, seen))
        return False

    def _on_stall(self, stall: Stall) -> None:
        """Called in the watchdog's thread."""
        if self.last is None:
            text = message(stall, self.folder, self.ranks.world)
            self._remember(Failed(text, RunFailed.exit_code, "stalled"))
            self._kill()

    # -- ending

    def _on_signal(self, *_: object) -> None:
        if self.local is None:
            raise KeyboardInterrupt  # while vLLM is being started
        self.stop()

    def stop(self) -> None:
        """Ask the training processes to finish their step, save and leave; a second call kills them. For any thread."""
        self.stops += 1
        if self.group is not None:
            self.group.say(stops=self.stops)
        if self.stops > 1:
            self._kill()
            return
        # in a thread, as this one may be announcing an event already
        threading.Thread(target=self.announce, args=[Phase(STOPPING)], daemon=True).start()
        if self.local is not None:
            self.local.send(signal.SIGTERM)

    def _kill(self) -> None:
        self._is_killed = True
        if self.group is not None and self.node == 0:
            self.group.say(kill=True)
        if self.local is not None:
            self.local.kill()

    def _on_exit(self, rank: int, code: int | None) -> None:
        """Called in a thread when a process has ended. If it was not ended by us, the others would wait for it."""
        if code == 0 or self._is_killed:
            return
        self.lost = self.lost or (rank, code)
        if code is not None and code < 0 and self.last is None and not self.stops:
            self._say_end(Failed(how_it_ended(rank, self.ranks.world, code), RunFailed.exit_code), is_cause=True)
        if self.ranks.world > 1 and self.last is None:
            self._kill_in(PATIENCE if code is not None and code > 0 else 0.0)  # its error may still be in the pipe

    def _end(self) -> Failed | Ended:
        """How the run ended. Where a rank was killed, or a machine lost, the others failed because of that."""
        if self.group is not None and self.group.others:
            self._end_with_others(self.group)
        is_failure = isinstance(self.last, Failed) and self.last.exit_code == RunFailed.exit_code
        if self.cause is not None and is_failure and not self.stops:
            return self.cause
        rank, code = self.lost or (self.ranks.first, 0)
        is_cause = (
            (code is None or -code in CRASHES)
            and isinstance(self.last, Failed)
            and self.last.exit_code == RunFailed.exit_code
        )
        if self.last is not None and not is_cause:
            return self.last
        if self.stops:
            return Failed("Stopped.", Interrupted.exit_code)
        lines = [how_it_ended(rank, self.ranks.world, code)]
        if code != -signal.SIGKILL and self.plan.config.rl_env_isolation == "thread":
            lines.append("If the environment's code ended it: with --rl-env-isolation process the training continues.")
        return Failed("\n".join(lines), RunFailed.exit_code)

    # -- other machines

    def _check_others(self) -> None:
        """Called before the processes are started.

        Raises:
            AitrainError: another machine is lost, has failed, or was stopped.
        """
        if self.group is not None:
            self.group.check()
        if isinstance(self.last, Failed):
            error = AitrainError(self.last.message)
            error.exit_code = self.last.exit_code
            raise error

    def _say_end(self, event: Failed | Ended, is_cause: bool = False) -> None:
        """Tell the other machines how the run ended, or that a process was killed, which is the cause of all else."""
        if self.group is not None and (self.node == 0 or isinstance(event, Failed)):
            self.group.say(end={**asdict(event), "is_cause": is_cause})

    def _on_state(self, rank: int, state: State) -> None:
        """Called again and again, in a thread, with what another machine says of itself."""
        assert self.group is not None
        name = self.group.name(rank)
        if state.get("stops", 0) > 0 and self.stops == 0:
            if self.node == 0:
                self.announce(Note(f"{name} was asked to stop", "info"))
                self.stop()
            else:
                self.stops = 1
                if self.local is not None:
                    self.local.send(signal.SIGTERM)
        if (state.get("stops", 0) > 1 or state.get("kill")) and not self._is_killed:
            self.stops = max(self.stops, state.get("stops", 0))
            self._kill()
        if "end" in state:
            self._hear_end(state["end"], name, self.group.name(self.node))
        elif state.get("over") and self.last is None and self.lost is None and not self.stops:
            self._on_lost(f"{name} ended")

    def _hear_end(self, end: State, name: str, own: str) -> None:
        """Node 0 hears of failures elsewhere; the others hear from node 0 how the run ended, on whichever machine."""
        if "step" in end:
            self._remember(Ended(end["status"], end["step"], end["because"]))
            return
        message, is_own = end["message"], end["message"].startswith(f"{own}: ")
        text = message.removeprefix(f"{own}: ") if is_own else f"{name}: {message}"
        failed = Failed(text, end["exit_code"], end["status"])
        if not is_own and (end["is_cause"] or self.node > 0):
            self.cause = self.cause or failed
        if self.last is None and self.node == 0:
            self.announce(failed)
        self._remember(failed)
        if end["is_cause"] and not self._is_killed:
            self._kill()

    def _on_lost(self, why: str) -> None:
        """A machine is gone: no collective operation of ours can end."""
        if not isinstance(self.last, Ended):
            self.cause = self.cause or Failed(why, RunFailed.exit_code)
            self._remember(self.cause)
            self._kill()

    def _end_with_others(self, group: NodeGroup) -> None:
        """Wait for the word of node 0, or on node 0 until the others have ended; a lost machine is named in time."""
        if self.node > 0 and self.last is None and self.lost is None and not self._is_killed:
            self._decided.wait(PATIENCE)
        elif not isinstance(self.last, Ended):
            group.wait_for_others(group.silence + LOOK_SECONDS, lambda: self.cause is not None)
        elif self.node == 0:
            group.wait_for_others(PATIENCE, lambda: False)

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Tell the others that this machine ends, and why if nothing was said yet."""
        assert self.group is not None
        if error is not None and self.last is None:
            is_stop = isinstance(error, (KeyboardInterrupt, Interrupted))
            message = "was stopped" if is_stop else str(error) or type(error).__name__
            code = Interrupted.exit_code if is_stop else getattr(error, "exit_code", RunFailed.exit_code)
            self._say_end(Failed(message, code))
        self.group.leave()


def process_variables(plan: RunPlan) -> dict[str, str]:
    """Environment variables of a training process; those of the user win, except for the GPUs, which the plan chose."""
    return {**default_variables(plan), **without_ranks(os.environ), **gpu_variables(plan)}


def default_variables(plan: RunPlan) -> dict[str, str]:
    """Environment variables of a training process that the user has not set."""
    share = max(1, usable_cores() // plan.processes)
    return {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",  # the order of sets is the same in every run and on every rank
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take the cores from each other, and from other programs
        "OMP_NUM_THREADS": "1" if not plan.gpus and is_small(plan.config.model) else str(share),
    }


def gpu_variables(plan: RunPlan) -> dict[str, str]:
    """Makes only the GPUs of the plan visible."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(plan.gpus)} if plan.gpus else {}
