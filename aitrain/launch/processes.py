"""Starts, watches and ends the training processes of a run.

The first Ctrl-C or SIGTERM makes the training processes finish their step and save; a second one kills them.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from aitrain.activity import VARIABLE as ACTIVITY_VARIABLE
from aitrain.activity import SharedMemory, Snapshot, read
from aitrain.errors import Interrupted, RunFailed
from aitrain.events import Announce, Ended, Event, Failed, Phase, Started, decode
from aitrain.launch.launched_ranks import LaunchedProcesses
from aitrain.launch.local_processes import LocalProcesses, Ranks, how_it_ended, worker_command
from aitrain.launch.machine_store import MachineStore
from aitrain.launch.machines import without_ranks
from aitrain.launch.managed_server import managed_server
from aitrain.launch.model_shape import is_small
from aitrain.launch.preflight import RunPlan
from aitrain.launch.stop_signals import on_stop_signals
from aitrain.launch.system_recorder import SystemRecorder
from aitrain.machine import usable_cores
from aitrain.redaction import RedactedLog, disable_telemetry
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.watchdog import Stall, Watchdog, ask_for_stacks, message, waits_for_another_rank

PATIENCE = 60.0
"""Seconds that a process gets to exit after it reported its end."""
AFTER_FAILURE = 10.0
"""The same after the failure of one of several ranks: the others may hang, and have nothing to finish."""
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that end one rank and make the others fail; SIGABRT is how NCCL ends the others."""
TIMED_OUT = re.compile(r"Rank (\d+) timed out [^.\n]*")
"""What a rank says that waited for another one (training/distributed.py)."""
STOPPING = "stopping after this step; Ctrl-C again ends it at once"


@dataclass
class Processes:
    """The training processes of one run, in their parent."""

    plan: RunPlan
    folder: RunFolder
    announce: Announce
    store: MachineStore | None = None
    """By which the processes that another launcher started are reached."""
    pids: dict[int, int] = field(default_factory=dict)
    """Process ids by rank."""
    last: Failed | Ended | None = None
    stops: int = 0
    ranks: Ranks = field(default_factory=Ranks)
    local: LocalProcesses | LaunchedProcesses | None = None
    lost: tuple[int, int | None] | None = None
    """Rank and exit code of the first process that ended with an error and was not ended by us."""
    server: dict[str, str] = field(default_factory=dict)
    """Environment variables with address and key of the run's own vLLM servers."""
    watchdog: Watchdog | None = None
    listener: socket.socket | None = None
    """On which rank 0 runs torch's store, on one machine."""
    activity: SharedMemory | None = None
    """Phases and progress counts, written by the training processes."""
    _is_killed: bool = False

    def run(self) -> Failed | Ended:
        """Start the processes, announce their events, and wait for the last one to exit.

        Returns the first failure, or how the run ended.
        """
        disable_telemetry(self.plan.config.telemetry)
        with ExitStack() as stack:
            stack.enter_context(on_stop_signals(self._on_signal))
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
    def log(self) -> Path:
        """Where the processes of this machine write what libraries and the environment print."""
        return self.folder.log

    @property
    def system(self) -> Path:
        """Where the use of this machine is recorded."""
        return self.folder.system

    def _prepare(self, stack: ExitStack) -> None:
        """Start what the processes need, and decide on their ranks."""
        self.server = stack.enter_context(managed_server(self.plan, self.folder, self.announce))
        count, port = self.plan.batch.processes, 0
        if count > 1:
            self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=count))
            port = self.listener.getsockname()[1]
        self.ranks = Ranks(count, world=count, port=port, has_store=True)

    def _start(self, log: RedactedLog) -> LocalProcesses | LaunchedProcesses:
        if self.store is not None:
            assert self.plan.launched is not None
            launched = LaunchedProcesses(self.plan.launched, self.store, self._on_exit)
            defaults = default_variables(self.plan)
            place = self.ranks, log, self.folder.lock, self.listener
            launched.start(self._command(), defaults, self._added(), *place)
            return launched
        local = LocalProcesses(self._on_exit)
        local.start(self._command(), self._environment(), self.ranks, log, self.folder.lock, self.listener)
        return local

    def _command(self) -> list[str]:
        return worker_command(self.plan, self.folder, self.plan.checkpoint)

    def _environment(self) -> dict[str, str]:
        return {**process_variables(self.plan), **self._added()}

    def _added(self) -> dict[str, str]:
        """What this run adds to the variables of the command."""
        activity = {ACTIVITY_VARIABLE: str(self.activity.path)} if self.activity else {}
        return {**gpu_variables(self.plan), **self.server, **activity}

    def _hear(self, event: Event) -> None:
        if isinstance(event, Started):
            self.pids[event.rank] = event.pid
            if self.activity is not None and len(self.pids) == self.ranks.count:
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
        phase = hung.seen.part.name if hung.seen else "starting"
        who = f"rank {hung.rank}{self._place(hung.rank)}"
        why = f"{found[0]}: {who} made no progress for {hung.idle.seconds:.0f} seconds ({phase})"
        return replace(event, message=why + event.message[found.end() :])

    def _place(self, rank: int) -> str:
        """The machine of a rank, for messages; empty if there is one."""
        return ""

    def _remember(self, event: Failed | Ended) -> None:
        """Keep the first failure, as the others follow from it; kill processes that do not exit in time."""
        if self.last is None:
            self.last = event
            if self.watchdog is not None:
                self.watchdog.stop()
            is_alone = self.plan.batch.processes == 1
            self._kill_in(PATIENCE if is_alone or isinstance(event, Ended) else AFTER_FAILURE)

    def _kill_in(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True
        timer.start()

    # -- hangs

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """End the run if it makes no progress."""
        count = self.plan.batch.processes
        self.activity = shared = SharedMemory(count)
        seconds, look = self.plan.config.stall_timeout, partial(read, shared.memory)
        self.watchdog = Watchdog(seconds, count, look, self._on_stall, self.pids, self._waits)
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
            text = message(stall, self.folder, self.plan.batch.processes)
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
        if self.stops > 1:
            self._kill()
            return
        # in a thread, as this one may be announcing an event already
        threading.Thread(target=self.announce, args=[Phase(STOPPING)], daemon=True).start()
        if self.local is not None:
            self.local.send(signal.SIGTERM)

    def _kill(self) -> None:
        self._is_killed = True
        if self.local is not None:
            self.local.kill()

    def _on_exit(self, rank: int, code: int | None) -> None:
        """Called in a thread when a process has ended. If it was not ended by us, the others would wait for it."""
        if code == 0 or self._is_killed:
            return
        self.lost = self.lost or (rank, code)
        if self.ranks.world > 1 and self.last is None:
            self._kill_in(PATIENCE if code is not None and code > 0 else 0.0)  # its error may still be in the pipe

    def _end(self) -> Failed | Ended:
        """How the run ended. Where a rank was killed, the others failed because of that."""
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
