"""The training processes of one of several machines, in a parent that is connected to node 0's, or is node 0's.

Node 0 hears the events of all, watches the progress of all ranks, and decides how the run ended. The others forward
events and progress, and end when node 0 says so or is lost.
"""

from __future__ import annotations

import json
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from aitrain.activity import Part, RolloutProgress, SharedMemory, Snapshot, read, write
from aitrain.errors import AitrainError, Interrupted, RunFailed
from aitrain.events import Ended, Event, Failed, Note, Started, decode, encode
from aitrain.launch.local_processes import Ranks, how_it_ended, worker_command
from aitrain.launch.managed_server import managed_server
from aitrain.launch.node_link import Message, NodeLink, Peer
from aitrain.launch.nodes import SharedFolder, interface_variables
from aitrain.launch.processes import PATIENCE, Processes
from aitrain.runs import node_info
from aitrain.runs.node_info import NodeInfo
from aitrain.runs.watchdog import IdleClock, WatchedProcess

STACKS_SECONDS = 6.0
"""Seconds to wait for another machine's word on whether a rank waits for another one."""
CAUSE_SECONDS = 5.0
"""Seconds for the news that a machine is lost, after a rank failed, as it may have failed because of that."""


@dataclass
class LinkedProcesses(Processes):
    """The processes of one machine of several; the base class of node 0 and of the others."""

    link: NodeLink = field(kw_only=True)
    cause: Failed | None = None
    """The loss of a machine or of one of its processes, which explains the errors of the ranks."""
    _decided: threading.Event = field(default_factory=threading.Event)

    def _connect(self, stack: ExitStack) -> None:
        stack.push(self._leave)
        self.link.on_message, self.link.on_lost = self._on_message, self._on_lost
        self.link.start()

    def _environment(self) -> dict[str, str]:
        return {**interface_variables(self.link.own_address), **super()._environment()}

    def _check_others(self) -> None:
        """Called before the processes are started.

        Raises:
            AitrainError: another machine has failed, or was stopped.
        """
        if isinstance(self.last, Failed):
            error = AitrainError(self.last.message)
            error.exit_code = self.last.exit_code
            raise error

    def _on_message(self, peer: Peer, message: Message) -> None:
        raise NotImplementedError

    def _remember(self, event: Failed | Ended) -> None:
        super()._remember(event)
        self._decided.set()

    def _on_lost(self, why: str) -> None:
        """A machine is gone: no collective operation of ours can end."""
        if isinstance(self.last, Ended):
            return
        self.cause = self.cause or Failed(why, RunFailed.exit_code)
        self._remember(self.cause)
        self._kill()

    def _is_crash(self, code: int | None) -> bool:
        """Whether a rank was ended by a signal that is not ours; one that is still starting is ended by a stop."""
        return code is not None and code < 0 and not self._is_killed and self.last is None and not self.stops

    def _end(self) -> Failed | Ended:
        if isinstance(self.last, Failed) and self.last.exit_code == RunFailed.exit_code and not self.stops:
            return self.cause or super()._end()
        return super()._end()

    def _leave(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Tell the others that this machine ends, and why if nothing was said yet."""
        if error is not None:
            is_stop = isinstance(error, (KeyboardInterrupt, Interrupted))
            message = "was stopped" if is_stop else str(error) or type(error).__name__
            code = Interrupted.exit_code if is_stop else getattr(error, "exit_code", RunFailed.exit_code)
            self.link.tell("failed", message=message, exit_code=code, status="failed")
        self.link.tell("bye")
        self.link.close()


@dataclass
class LeadingProcesses(LinkedProcesses):
    """The processes of node 0."""

    _waits_of: queue.Queue[tuple[int, bool]] = field(default_factory=queue.Queue)

    def _prepare(self, stack: ExitStack) -> None:
        self._connect(stack)
        self.folder.write_status("running", nodes=node_info.as_json(self._nodes()))
        self.server = stack.enter_context(managed_server(self.plan, self.folder, self.announce))
        self._check_others()
        held = stack.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port = held.getsockname()[1]
        self.ranks = Ranks(self.plan.processes, 0, self.plan.batch.processes, self.link.own_address, port)
        self.link.tell("start", port=port, server=self.server, world=self.ranks.world)

    def _nodes(self) -> list[NodeInfo]:
        own = NodeInfo(0, socket.gethostname(), self.link.own_address, len(self.plan.gpus))
        return [own, *(NodeInfo(peer.node, peer.host, peer.address, peer.gpus) for peer in self.link.peers)]

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), node_info.VARIABLE: json.dumps(node_info.as_json(self._nodes()))}

    # -- from the others

    def _on_message(self, peer: Peer, message: Message) -> None:
        match message.get("kind"):
            case "beat":
                self._note_progress(message.get("ranks", {}))
            case "event":
                self._hear_of(peer, decode(str(message.get("line"))))
            case "crash":
                self.cause = Failed(f"{peer.name}: {message['message']}", RunFailed.exit_code)
                self._remember(self.cause)
                self._kill()
            case "failed":
                self._remember(Failed(f"{peer.name}: {message['message']}", message["exit_code"]))
            case "stop":
                if not self.stops:
                    self.announce(Note(f"{peer.name} was asked to stop", "info"))
                    self.stop()
            case "kill":
                self.stops = max(self.stops, 2)
                self._kill()
            case "waits":
                self._waits_of.put((message["rank"], bool(message["waits"])))
            case "bye" if self.last is None and self.lost is None:
                if not self.stops:
                    self._on_lost(f"{peer.name} ended")
                self._kill()

    def _note_progress(self, ranks: dict[str, tuple[int, list[Any], list[Any]]]) -> None:
        if self.activity is not None:
            for rank, (count, part, rollout) in ranks.items():
                write(self.activity.memory, int(rank), Snapshot(count, Part(*part), RolloutProgress(*rollout)))

    def _hear_of(self, peer: Peer, event: Event | None) -> None:
        """An event of another machine's rank; its process id means nothing here."""
        if isinstance(event, Failed):
            explained = self._explain_timeout(event)
            event = Failed(f"{peer.name}: {explained.message}", event.exit_code, event.status)
            self._remember(event)
        if event is not None:
            self.announce(event)

    # -- to the others

    def _remember(self, event: Failed | Ended) -> None:
        is_first = self.last is None
        super()._remember(event)
        if is_first and isinstance(event, Ended):
            self.link.tell("ended", **asdict(event))
        elif is_first:
            self.link.tell("failed", **asdict(event))

    def stop(self) -> None:
        """As on one machine, on all of them."""
        super().stop()
        self.link.tell("stop")

    def _kill(self) -> None:
        self.link.tell("kill")
        super()._kill()

    def _on_exit(self, rank: int, code: int | None) -> None:
        if self._is_crash(code):
            message = how_it_ended(rank, self.ranks.world, code)
            self.link.tell("failed", message=message, exit_code=RunFailed.exit_code, status="failed")
        super()._on_exit(rank, code)

    def _waits(self, rank: int, seen: Snapshot) -> bool:
        if rank in self.ranks:
            return super()._waits(rank, seen)
        peer = self._peer(rank)
        self.link.tell("stacks", only=peer, rank=rank)
        try:
            while True:
                answered, waits = self._waits_of.get(timeout=STACKS_SECONDS)
                if answered == rank:
                    return waits
        except queue.Empty:
            return False

    def _peer(self, rank: int) -> Peer:
        return self.link.peers[rank // self.ranks.count - 1]

    def _place(self, rank: int) -> str:
        return " on node 0" if rank in self.ranks else f" on {self._peer(rank).name}"

    def _end(self) -> Failed | Ended:
        """After the others have ended as well."""
        has_failed = not isinstance(self.last, Ended)
        self.link.wait_for_byes(CAUSE_SECONDS if has_failed else PATIENCE, lambda: self.cause is not None)
        return super()._end()


@dataclass
class FollowingProcesses(LinkedProcesses):
    """The processes of another machine than node 0."""

    shared: SharedFolder = field(kw_only=True)
    _has_heard: bool = False
    """Whether node 0 has said that the run failed."""
    _begun: queue.Queue[Message | None] = field(default_factory=queue.Queue)
    _watched_ranks: dict[int, WatchedProcess] = field(default_factory=dict)
    _moved: dict[int, int] = field(default_factory=dict)
    """How often each rank has moved files, which node 0 cannot see."""

    @property
    def log(self) -> Path:
        """A file of its own: several machines cannot append to one file of a network file system."""
        assert self.plan.nodes is not None
        return self.folder.path / f"train-node{self.plan.nodes.rank}.log"

    @property
    def system(self) -> Path:
        """A file of this machine."""
        assert self.plan.nodes is not None
        return self.folder.system_of(self.plan.nodes.rank)

    def _prepare(self, stack: ExitStack) -> None:
        assert self.plan.nodes is not None
        self.link.beat = self._progress
        self._connect(stack)
        begun = self._begun.get()  # node 0 may start a vLLM server first
        self._check_others()
        assert begun is not None
        count, address = self.plan.processes, self.link.peers[0].address
        self.ranks = Ranks(count, count * self.plan.nodes.rank, begun["world"], address, begun["port"])
        self.server = begun["server"]

    def _command(self) -> list[str]:
        return worker_command(self.plan, self.folder, self.shared.checkpoint)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Node 0 watches the progress, as ranks here may wait for one of another machine."""
        self.activity = SharedMemory(self.ranks.world)
        self._watched_ranks = {rank: WatchedProcess(rank, IdleClock(1.0)) for rank in self.ranks}
        try:
            yield
        finally:
            self.activity.unlink()

    def _progress(self) -> Message:
        """The heartbeat: the activity of each rank."""
        if self.activity is None:
            return {}
        ranks = {}
        for rank, process in self._watched_ranks.items():
            seen, process.pid = read(self.activity.memory, rank), self.pids.get(rank)
            self._moved[rank] = self._moved.get(rank, 0) + process.moves_files(seen)
            ranks[rank] = (seen.count + self._moved[rank], astuple(seen.part), astuple(seen.rollout))
        return {"ranks": ranks}

    def _on_message(self, peer: Peer, message: Message) -> None:
        match message.get("kind"):
            case "start":
                self._begun.put(message)
            case "ended":
                self._remember(Ended(message["status"], message["step"], message["because"]))
            case "failed":
                self._hear_failure(peer, message)
            case "stop":
                self.stops = max(self.stops, 1)
                if self.local is not None:
                    self.local.send(signal.SIGTERM)
            case "kill":
                self._kill()
            case "stacks":
                rank = message["rank"]
                assert self.activity is not None
                self.link.tell("waits", rank=rank, waits=self._waits(rank, read(self.activity.memory, rank)))
            case "bye" if self.last is None:
                self._on_lost(f"{peer.name} ended")

    def _hear_failure(self, peer: Peer, message: Message) -> None:
        """Node 0's word on why the run failed explains the errors of the ranks here, unless it was one of these."""
        assert self.plan.nodes is not None
        what, own = message["message"], f"node {self.plan.nodes.rank} ("
        is_own = what.startswith(own)
        error = what.partition("): ")[2] if is_own else ""
        failed = Failed(error or f"{peer.name}: {what}", message["exit_code"], message["status"])
        if not is_own:
            self.cause = self.cause or failed
        self._remember(failed)
        self._has_heard = True
        self._begun.put(None)

    def _on_lost(self, why: str) -> None:
        self.link.tell("failed", message=why, exit_code=RunFailed.exit_code)  # node 0 may have been halted only
        super()._on_lost(why)
        self._begun.put(None)

    def _hear(self, event: Event) -> None:
        if not isinstance(event, Started):
            self.link.tell("event", line=encode(event))
        super()._hear(event)

    def stop(self) -> None:
        """As on one machine, and on the others by node 0."""
        super().stop()
        self.link.tell("stop" if self.stops == 1 else "kill")

    def _on_exit(self, rank: int, code: int | None) -> None:
        if self._is_crash(code):
            self.link.tell("crash", message=how_it_ended(rank, self.ranks.world, code))
        super()._on_exit(rank, code)

    def _end(self) -> Failed | Ended:
        if self.last is None and self.lost is None and not self._is_killed:
            self._decided.wait(PATIENCE)  # for the end of rank 0
        elif isinstance(self.last, Failed):
            self.link.wait_for_byes(CAUSE_SECONDS, lambda: self.cause is not None or self._has_heard)
        if self.last is None and self.lost is not None and not self.stops:
            self.link.tell("crash", message=how_it_ended(self.lost[0], self.ranks.world, self.lost[1]))
        return super()._end()
