"""Runs the training processes of a run on a Ray cluster, through Ray Train, which restarts them when one is lost."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

from aitrain.activity import Part, Snapshot
from aitrain.errors import AitrainError, Interrupted, RunFailed
from aitrain.events import Announce, Ended, Failed, Note, Phase, decode
from aitrain.execution.ray_connection import connected, machines
from aitrain.launch.preflight import RunPlan
from aitrain.launch.processes import PATIENCE, STOPPING
from aitrain.launch.ray_fit import PRIVATE, bundles, fit, start_relay
from aitrain.launch.ray_placement import describe
from aitrain.launch.ray_relay import Meeting, RankNews, Requests
from aitrain.launch.ray_server import server_on_ray
from aitrain.launch.stop_signals import on_stop_signals
from aitrain.launch.system_recorder import SystemRecorder
from aitrain.redaction import disable_telemetry
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.watchdog import DUMP_SECONDS, Stall, Watchdog, message

KILL_SECONDS = 10.0
"""How long a second stop waits for the machines to kill the training processes."""
LOOK = 5.0
"""Seconds between two looks at the machines of the cluster."""


@dataclass
class RayProcesses:
    """The training processes of one run on a Ray cluster, in the process of the command."""

    plan: RunPlan
    folder: RunFolder
    announce: Announce
    last: Failed | Ended | None = None
    requests: Requests = field(default_factory=Requests)
    meeting: Meeting | None = None
    """The ranks that run now."""
    starts: int = 0
    lost: str = ""
    """What was lost last: a process or a machine."""
    relay: Any = None
    _seen: dict[int, Snapshot] = field(default_factory=dict)
    _waits: dict[int, bool] = field(default_factory=dict)
    _failure: BaseException | None = None

    def run(self) -> Failed | Ended:
        """Start the processes, announce their events, and wait for the last one to exit.

        Returns the first failure, or how the run ended.

        Raises:
            ConfigError: there is no such cluster.
        """
        disable_telemetry(self.plan.config.telemetry)
        try:
            self._run()
        except Interrupted as error:  # while Ray was being connected, or vLLM started
            return Failed(str(error), error.exit_code)
        return self._end()

    def _run(self) -> None:
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder.path / PRIVATE, ignore_errors=True)
            self.announce(Phase("connecting to Ray"))
            stack.enter_context(on_stop_signals(partial(_leave, self)))
            stack.enter_context(connected(self.plan.config.ray_address, may_start=True))
            stack.enter_context(on_stop_signals(lambda *_: self.stop()))  # after Ray has set its own handlers
            self.relay = start_relay(self.plan, self.folder)
            text, fits = describe(bundles(self.plan), machines())  # before Ray waits for it, as Ray waits silently
            self.announce(Note(text, "info" if fits else "warning"))
            self.announce(Phase("waiting for the machines of Ray"))
            stack.enter_context(server_on_ray(self.plan, self.folder, self.relay, self._is_stopped))
            stack.enter_context(SystemRecorder(self.folder.system))
            watchdog = stack.enter_context(self._watchdog())
            fitting = threading.Thread(target=self._fit, name="ray-train", daemon=True)
            fitting.start()
            self._listen(fitting)
            watchdog.stop()

    # -- Ray

    def _is_stopped(self) -> bool:
        """Hear what vLLM's machine says while it starts; whether the run was stopped meanwhile."""
        self._hear_all(0.5)
        return self.requests.stops > 0

    def _fit(self) -> None:
        """Run Ray Train until the run has ended; runs in a thread, as it blocks."""
        try:
            fit(self.plan, self.folder, self.relay)
        except BaseException as error:
            self._failure = error

    # -- news

    def _listen(self, fitting: threading.Thread) -> None:
        """Hear what the ranks say, until the run has ended."""
        from ray.exceptions import RayError

        looked, killed = time.monotonic(), float("inf")
        try:
            while fitting.is_alive():
                self._hear_all(0.5)
                if self.requests.stops and (self.meeting is None or self.lost):
                    self.last = None  # nothing runs: what the other ranks said followed from the loss
                    return
                killed = killed if self.requests.stops < 2 else min(killed, time.monotonic())
                if time.monotonic() - killed > KILL_SECONDS:
                    return  # a machine does not answer
                if time.monotonic() - looked > LOOK:
                    self._look_for_lost_machines()
                    looked = time.monotonic()
            self._hear_all(0.0)
        except RayError as error:
            self._failure = RunFailed(f"The Ray cluster is gone: {cause_of(error)}")

    def _hear_all(self, seconds: float) -> None:
        import ray

        for news in ray.get(self.relay.take.remote(seconds)):
            if isinstance(news, Meeting):
                self._note_start(news)
            else:
                self._hear(news)

    def _note_start(self, meeting: Meeting) -> None:
        """All ranks are there: the first start, or one after a loss."""
        self.starts, self.meeting, self.last = self.starts + 1, meeting, None
        self._seen.clear()
        if meeting.problem:
            self._remember(Failed(meeting.problem, 2))
            return
        self.folder.write_status("running", nodes=meeting.nodes())
        restart = f"restart {self.starts - 1} of {self.plan.config.max_failures}" if self.starts > 1 else ""
        self.announce(_note_of_start(meeting, self.lost, restart))
        self.lost = ""

    def _hear(self, news: RankNews) -> None:
        if news.activity is not None:
            self._seen[news.rank] = news.activity
        if news.waits is not None:
            self._waits[news.rank] = news.waits
        if news.exit:
            self._seen.clear()  # waiting for the next start is no stall
            self.lost = f"{news.exit} on {self.meeting.places[news.rank]}" if self.meeting else news.exit
        for event in map(decode, news.lines):
            if isinstance(event, (Failed, Ended)):
                self._remember(event)
            if event is not None and not isinstance(event, Failed):  # one of a lost rank does not end the run
                self.announce(event)

    def _remember(self, event: Failed | Ended) -> None:
        """Keep the first failure of a start, as the others follow from it; kill processes that do not exit in time."""
        if self.last is None:
            self.last = event
            start = self.meeting.start if self.meeting else ""
            timer = threading.Timer(PATIENCE, self._ask, kwargs={"over": start})  # of this start only
            timer.daemon = True
            timer.start()

    def _look_for_lost_machines(self) -> None:
        if self.meeting is None or self.lost:
            return
        alive = {machine.address for machine in machines()}
        gone = {place.address: place for place in self.meeting.places if place.address not in alive}
        if gone:
            place = next(iter(gone.values()))
            ranks = " and ".join(str(other.rank) for other in self.meeting.places if other.address == place.address)
            self._seen.clear()
            self.lost = f"Machine {place.host} ({place.address}) is gone, with rank {ranks}"
            self.announce(Note(f"{self.lost}. Ray starts all ranks again as soon as it has the machines for them."))

    # -- hangs

    def _watchdog(self) -> Watchdog:
        config, count = self.plan.config, self.plan.batch.processes
        return Watchdog(
            config.stall_timeout, range(count), self._activity, self._on_stall, waits=self._waits_for_another
        )

    def _activity(self, rank: int) -> Snapshot:
        """What a rank did last; waiting for Ray counts as progress."""
        return self._seen.get(rank) or Snapshot(time.monotonic_ns(), Part("waiting for Ray"))

    def _waits_for_another(self, rank: int, _: Snapshot) -> bool:
        """Whether a stalled rank waits for another one, by its stacks, which go to its log."""
        if rank not in self._waits:
            self._ask(stacks=self.requests.stacks + 1)
            deadline = time.monotonic() + 2 * DUMP_SECONDS
            while len(self._waits) < self.plan.batch.processes and time.monotonic() < deadline:
                time.sleep(0.1)
        return self._waits.get(rank, False)

    def _on_stall(self, stall: Stall) -> None:
        """Called in the watchdog's thread."""
        if self.last is None:
            text = message(stall, self.folder, self.plan.batch.processes)
            self.last = Failed(text, RunFailed.exit_code, "stalled")
            self._ask(stops=2)

    # -- ending

    def stop(self) -> None:
        """Ask the training processes to finish their step, save and leave; a second call kills them. For any thread."""
        stops = min(self.requests.stops + 1, 2)
        if stops == 1:
            threading.Thread(target=self.announce, args=[Phase(STOPPING)], daemon=True).start()
        threading.Thread(target=self._ask, kwargs={"stops": stops}, daemon=True).start()
        self.requests = replace(self.requests, stops=stops)

    def _ask(self, **requests: Any) -> None:
        self.requests = replace(self.requests, **requests)
        if self.relay is not None:
            self.relay.ask.remote(self.requests)

    def _end(self) -> Failed | Ended:
        """How the run ended. Where a rank was lost, the others failed because of that."""
        is_cause = self._failure is not None and getattr(self.last, "exit_code", None) == RunFailed.exit_code
        if self.last is not None and not is_cause:
            return self.last
        if self.requests.stops:
            return Failed("Stopped.", Interrupted.exit_code)
        if isinstance(self._failure, AitrainError):
            return Failed(str(self._failure), self._failure.exit_code)
        restarts = self.starts - 1
        given_up = f"\nIt was started again {restarts} times (--max-failures)." if restarts > 0 else ""
        return Failed(f"{self.lost or cause_of(self._failure)}.{given_up}\nSee {self.folder.log}", RunFailed.exit_code)


def _note_of_start(meeting: Meeting, lost: str, restart: str) -> Note:
    """Where the ranks run, and at a restart why and from which checkpoint."""
    where = "; ".join(f"rank {place.rank} on {place}" for place in meeting.places)
    if not restart:
        return Note(f"Training on Ray: {where}.", "info")
    since = meeting.checkpoint.rpartition("/")[2] if meeting.checkpoint else "the beginning"
    return Note(f"{lost or 'A rank was lost'}. All ranks continue from {since} ({restart}): {where}.")


def _leave(processes: RayProcesses, *_: object) -> NoReturn:
    """Handle a stop signal while Ray is being connected."""
    processes.stop()  # also if the exception gets lost in a callback of Ray
    raise Interrupted("Stopped.")


def cause_of(error: BaseException | None) -> str:
    """The first cause of an error of Ray Train, in one sentence without its traceback."""
    failures = getattr(error, "worker_failures", None) or {}
    rank, cause = next(iter(failures.items()), (None, error))
    cause = getattr(cause, "controller_failure", cause)
    # fields of the actor are indented, such as `class_name: RayTrainWorker`
    lines = [line for line in str(cause).splitlines() if line.strip() and not line.startswith("\t")]
    if any(line.startswith("Traceback") for line in lines):
        lines = lines[-1:]
    text = " ".join(line.strip() for line in lines)[:300].rstrip(".") or type(cause).__name__
    return text if rank is None else f"Rank {rank} was lost: {text}"
