"""Several machines as one run: what they tell each other before and beside the training, what must be equal on all of
them, the folder that they share, and which one is lost.

The command runs on each machine, and all are connected to a store that node 0 or the launcher runs, JSON in torch's
TCPStore. It has no authentication: whoever reaches its port can read and write it, so no secret is put there. All that
a machine tells the others is its state, a JSON object in the store, which it writes several times a second. Node 0
reads the states of all others, and these read that of node 0.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from aitrain.errors import AitrainError, ConfigError, Interrupted, RunFailed, to_aitrain_error
from aitrain.events import Failed
from aitrain.launch.machines import Nodes
from aitrain.options.train import TrainConfig
from aitrain.packages import PACKAGE, version_of
from aitrain.runs.environment_source import source_hash, with_imported
from aitrain.runs.heartbeat import NodeInfo
from aitrain.runs.run_folder import RunFolder, read_object

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

POLL = 0.1
"""Seconds between two looks for a value."""
TRY_SECONDS = 5.0
"""Seconds of one attempt to connect; Ctrl-C is heard between two."""
STORE_SECONDS = 60.0
"""Maximum seconds for the store to answer."""
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft")
"""Packages whose versions must be equal."""
SMALL_FILE = 1 << 20
"""Bytes below which a file of a model is compared: configurations, not weights."""
SEES_WITHIN = 5.0
"""Seconds for the run folder to appear on the other machines; network file systems are late."""
ANSWER_SECONDS = 120.0
"""Seconds for the answers while machines agree; libraries on a network file system load slowly."""
LEAVE_SECONDS = 5.0
"""Seconds for the other machines to read how the run ended."""
BEAT = 0.25
"""Seconds between two states of a machine."""
SILENCE = 20.0
"""Maximum seconds without a new state."""

Facts: TypeAlias = dict[str, Any]
State: TypeAlias = dict[str, Any]
"""What a machine says of itself: `beat`, `stops`, `end` and `over`, of which each is absent at first, and to
agree before the run `hello`, on node 0 `machines`, `folder` and `begin`."""


# -- the store


class MachineStore:
    """Values by name, for all processes that are connected. Every method raises RuntimeError, as torch does, if the
    machine of the store or the connection to it is lost."""

    def __init__(self, store: Store, prefix: str = "aitrain") -> None:
        self._store, self._prefix = store, prefix

    def below(self, start: int) -> MachineStore:
        """The same store with names of its own, for one of several starts of the processes."""
        return MachineStore(self._store, f"{self._prefix}/{start}")

    def put(self, name: str, value: object) -> None:
        """Set a value."""
        self._store.set(f"{self._prefix}/{name}", json.dumps(value))

    def get(self, name: str) -> Any:
        """A value; None if it is not set yet."""
        key = f"{self._prefix}/{name}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def open_store(nodes: Nodes, seconds: float, is_there: bool = False) -> MachineStore:
    """The store of some machines: node 0 runs it, unless a launcher does; for one machine it listens on 127.0.0.1 only.

    Raises:
        ConfigError: its port is in use; or nothing answers there within these seconds.
    """
    if nodes.rank > 0 or is_there:
        return join_store(nodes.address, nodes.port, seconds)
    place = "127.0.0.1" if nodes.count == 1 or nodes.address in ("127.0.0.1", "localhost") else ""
    try:
        family = socket.AF_INET6 if ":" in nodes.address else socket.AF_INET
        return store_on(socket.create_server((place, nodes.port), family=family, backlog=1024))
    except OSError as error:
        raise ConfigError(
            f"master_port: port {nodes.port} cannot be used on this machine: {error.strerror}\n"
            "Choose another with --master-port, on all machines."
        ) from None


def store_on(listener: socket.socket) -> MachineStore:
    """Run a store in this process, at a socket that listens: torch itself would listen on all addresses."""
    from torch._C._distributed_c10d import TCPStore  # here and below, because one process needs no store

    here, port = "127.0.0.1" if listener.family == socket.AF_INET else "::1", listener.getsockname()[1]
    timeout = timedelta(seconds=STORE_SECONDS)
    return MachineStore(
        TCPStore(here, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
    )


def join_store(address: str, port: int, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> MachineStore:
    """Connect to the store, which may not run yet. `meanwhile` is called between two attempts.

    Raises:
        ConfigError: nothing answers there within these seconds.
    """
    from torch._C._distributed_c10d import TCPStore

    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=TRY_SECONDS).close()
            store = TCPStore(address, port, None, False, timedelta(seconds=STORE_SECONDS), wait_for_workers=False)
            return MachineStore(store)
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        meanwhile()
        if time.monotonic() > deadline:
            raise ConfigError(
                f"master_addr: node 0 does not answer at {address}:{port}: {why}\n"
                "Start the command with --node-rank 0 there."
            )
        time.sleep(POLL)


# -- what must be equal


def facts(config: TrainConfig, env_files: Sequence[Path | None], processes: int) -> Facts:
    """What must be equal on all machines. The options are those of node 0, in its config.yaml."""
    files = Path(config.model).expanduser().glob("*")
    settings = [file for file in files if file.is_file() and file.stat().st_size < SMALL_FILE]
    return {
        "python": ".".join(map(str, sys.version_info[:2])),
        **{name: version_of(name) for name in PACKAGES},
        "aitrain's code": source_hash(sorted(PACKAGE.rglob("*.py"))),
        "the environment's code": source_hash(with_imported(filter(None, env_files))),
        "the model's files": source_hash(sorted(settings)),
        "number of training processes": processes,
    }


def difference(own: Facts, theirs: Facts) -> str:
    """The first facts that differ, as `trl 1.17.0 (node 0: 1.16.0)`; empty if none does."""
    names = [name for name in own if own[name] != theirs.get(name)]
    return "; ".join(f"{name} {str(theirs.get(name))[:60]} (node 0: {str(own[name])[:60]})" for name in names[:3])


# -- the machines


@dataclass
class NodeGroup:
    """The machines of a run, seen from one of them."""

    nodes: Nodes
    store: MachineStore
    silence: float = SILENCE
    infos: list[NodeInfo] = field(default_factory=list)
    """All machines, once they have met."""
    on_state: Callable[[int, State], None] = lambda rank, state: None
    """Called again and again with the state of another machine, in a thread."""
    on_lost: Callable[[str], None] = lambda why: None
    """Called when another machine is lost, in a thread."""
    lost: str = ""
    """Why the run cannot go on: another machine is lost."""

    def __post_init__(self) -> None:
        self._own = State()
        self._states = dict[int, State]()
        """The last states of others."""
        self._answered, self._heard = time.monotonic(), dict[int, float]()
        """When the store answered last, and when each other machine had a new state."""
        self._over, self._changed = threading.Event(), threading.Event()
        self._beating = threading.Thread(target=self._keep_beating, name="nodes", daemon=True)
        if self.others:
            self._beating.start()
            threading.Thread(target=self._watch, name="nodes", daemon=True).start()

    @property
    def others(self) -> list[int]:
        """The machines that this one hears: node 0 all others, and these only node 0."""
        return list(range(1, self.nodes.count)) if self.nodes.rank == 0 else [0]

    def name(self, rank: int) -> str:
        """`node 1 (nodeB, 10.77.0.2)`."""
        return f"node {rank}" + "".join(f" ({info.host}, {info.address})" for info in self.infos[rank : rank + 1])

    def say(self, **fields: object) -> None:
        """Change the state of this machine, and tell the others at once."""
        self._own = {**self._own, **fields}
        self._changed.set()

    def hear(self, rank: int, name: str, seconds: float = math.inf) -> Any:
        """What another machine says under a name; None if it does not within these seconds.

        Raises:
            AitrainError: it is lost, has failed, or was stopped.
        """
        deadline = time.monotonic() + seconds
        while (state := self._states.get(rank, {})).get(name) is None:
            if self.lost:
                raise RunFailed(self.lost)
            if "end" in state:
                error = AitrainError(self.message_of(state["end"]))
                error.exit_code = state["end"]["exit_code"]
                raise error
            if "over" in state:
                raise RunFailed(f"{self.name(rank)} ended")
            if time.monotonic() > deadline:
                return None
            time.sleep(POLL)
        return state[name]

    def message_of(self, end: Mapping[str, Any]) -> str:
        """The message of a failure, with the machine on which it was unless that is this one."""
        node = end["node"]
        return str(end["message"]) if node == self.nodes.rank else f"{self.name(node)}: {end['message']}"

    # -- meeting

    def meet(self, own: Facts, gpus: int, seconds: float) -> None:
        """Wait for all machines, which must be equal; node 0 compares them.

        Raises:
            AitrainError: a machine does not come, or differs from node 0.
        """
        own = {**own, "nnodes": self.nodes.count}
        if self.nodes.rank > 0:
            self.say(hello={"facts": own, "machine": [socket.gethostname(), own_address(self.nodes.address), gpus]})
            machines = self.hear(0, "machines", seconds + ANSWER_SECONDS)
            if machines is None:
                raise ConfigError(f"nnodes: node 0 at {self.nodes.place} does not answer\nSee the output there.")
            self.infos = [NodeInfo(rank, *machine) for rank, machine in enumerate(machines)]
            return
        self.infos, deadline = [NodeInfo(0, socket.gethostname(), "", gpus)], time.monotonic() + seconds
        for rank in self.others:
            hello = self.hear(rank, "hello", deadline - time.monotonic())
            if hello is None:
                why = f"node {rank} did not connect to {self.nodes.place} within {seconds:.0f} seconds"
                raise ConfigError(f"nnodes: {why} (--ddp-timeout)\nStart the same command there.")
            self.infos.append(NodeInfo(rank, *hello["machine"]))
            if unequal := difference(own, hello["facts"]):
                why = f"{self.name(rank)} differs from node 0: {unequal}"
                raise ConfigError(f"nnodes: {why}\nMake the machines equal.")
        # its name may be a loopback address here, as Debian has it
        self.infos[0] = replace(self.infos[0], address=own_address(self.infos[1].address))
        self.say(machines=[[info.host, info.address, info.gpus] for info in self.infos])

    def refuse(self, error: BaseException) -> None:
        """Tell the others why this machine ends, unless it has said so already."""
        ours = to_aitrain_error(error)
        why = Failed("was stopped" if isinstance(ours, Interrupted) else str(ours), ours.exit_code)
        if "end" not in self._own:
            self.say(end={**asdict(why), "node": self.nodes.rank, "is_cause": False})
        self.leave()

    # -- the run folder

    def show_folder(self, folder: RunFolder, checkpoint: Path | None, processes: int) -> None:
        """On node 0: tell the others the run folder, which all of them must see, and write into it which machines train
        with this number of processes each."""
        path = folder.path.resolve()
        self.store.put("folder", str(path))  # for a start after this one
        nodes = [asdict(replace(info, processes=processes)) for info in self.infos]
        folder.write_status("running", nodes=nodes)
        name = checkpoint and checkpoint.name
        self.say(folder={"path": str(path), "nodes": nodes, "epoch": folder.epoch, "checkpoint": name})

    def find_folder(self) -> tuple[RunFolder, Path | None] | None:
        """On another machine: the run folder of node 0, and the checkpoint to continue from; None if the run had
        finished.

        Raises:
            ConfigError: this machine does not see it.
            AitrainError: node 0 is gone, or has failed.
        """
        told = self.hear(0, "folder")
        if not told:
            return None
        folder = RunFolder(Path(told["path"]), epoch=told["epoch"])
        deadline = time.monotonic() + SEES_WITHIN
        while read_object(folder.status).get("nodes") != told["nodes"]:  # a folder of the same path is another one
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"output_dir: this machine does not see {folder.path} of node 0\n"
                    "Let --output-dir be a folder on a file system that all machines share."
                )
            for place in (folder.path.parent, folder.path):  # which makes NFS look again
                with suppress(OSError):
                    os.listdir(place)
            time.sleep(POLL)
        return folder, folder.checkpoints / told["checkpoint"] if told["checkpoint"] else None

    # -- the end

    def leave(self) -> None:
        """Tell the others that this machine has ended, as a machine that is silent is lost. Node 0, which may run the
        store, gives them a short time to hear it."""
        if self._over.is_set() or not self.others:
            return
        self.say(over=True)
        if self.nodes.rank == 0:
            self.wait_for_others(LEAVE_SECONDS)
        self._over.set()
        self._changed.set()
        self._beating.join(BEAT if self.lost else LEAVE_SECONDS)  # a connection that is cut blocks

    def wait_for_others(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until the machines that this one hears have ended or are lost, or `is_over`."""
        deadline = time.monotonic() + seconds
        while not is_over() and not self.lost and time.monotonic() < deadline:
            if all("over" in self._states.get(rank, {}) for rank in list(self._heard)):
                return
            time.sleep(0.05)

    # -- in threads

    def _keep_beating(self) -> None:
        """Write the own state, and read those of others. It blocks for as long as a connection does."""
        try:
            for beat in itertools.count():
                is_over = self._over.is_set()
                self._changed.clear()
                self.store.put(f"states/{self.nodes.rank}", {**self._own, "beat": beat})
                for rank in self.others:
                    if state := self.store.get(f"states/{rank}"):
                        if state["beat"] != self._states.get(rank, {}).get("beat"):
                            self._heard[rank] = time.monotonic()
                        self._states[rank] = state
                        self.on_state(rank, state)
                self._answered = time.monotonic()
                if is_over:
                    return
                self._changed.wait(BEAT)
        except RuntimeError:
            self._lose(0)

    def _watch(self) -> None:
        """Name the machine that is silent; node 0's store is local and always answers."""
        while not self._over.wait(BEAT):
            now = time.monotonic()
            silent = [rank for rank, heard in list(self._heard.items()) if now - heard > self.silence]
            for rank in [0] if now - self._answered > self.silence else silent:
                self._lose(rank)

    def _lose(self, rank: int) -> None:
        if not (self._over.is_set() or self.lost or "over" in self._states.get(rank, {})):
            self.lost = f"{self.name(rank)} is gone"
            self.on_lost(self.lost)


# -- addresses


def own_address(other: str) -> str:
    """Address by which another machine reaches this one."""
    family, kind, _, _, place = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as connection:
        connection.connect(place)  # sends nothing
        return str(connection.getsockname()[0])


def interface_variables(own_address: str) -> dict[str, str]:
    """Makes gloo use the network interface of the connection, as it would take the one of the host's name, which may be
    a loopback address. NCCL takes such an address only if there is no other."""
    import psutil

    every = psutil.net_if_addrs().items()
    names = [name for name, found in every if any(own_address == one.address for one in found)]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}
