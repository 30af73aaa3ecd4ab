"""Several machines as one run: what must be equal on all of them, the folder that they share, and which one is lost.

The command runs on each machine, and all are connected to a MachineStore that node 0 or the launcher runs. Each writes
its state there once a second. Node 0 reads the states of all others, and these read that of node 0.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from aitrain.errors import ConfigError, RunFailed
from aitrain.launch.machine_store import MachineStore, StoreLostError
from aitrain.launch.machines import Nodes
from aitrain.options.train import TrainConfig
from aitrain.packages import PACKAGE
from aitrain.redaction import without_secrets
from aitrain.runs.node_info import NodeInfo

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft")
"""Packages whose versions must be equal."""
PER_NODE = {"node_rank", "output_dir", "project_name", "resume_from_checkpoint"}
"""Options that may differ between machines; the others' values of the last three are not used."""
SMALL_FILE = 1 << 20
"""Bytes below which a file of a model is compared by its content: configurations, not weights."""
SEES_WITHIN = 5.0
"""Seconds for a file to appear on the other machines; network file systems are late."""
ANSWER_SECONDS = 120.0
"""Seconds for the answers while machines agree; libraries on a network file system load slowly."""
LEAVE_SECONDS = 5.0
"""Seconds for the other machines to read why the run does not start."""
BEAT = 1.0
"""Seconds between two states of a machine."""
SILENCE = 20.0
"""Maximum seconds without a new state."""

Facts: TypeAlias = dict[str, Any]
State: TypeAlias = dict[str, Any]
"""What a machine says of itself: `stops`, `kill`, `end` and `over`, of which each is absent at first."""


# -- what must be equal


def facts(config: TrainConfig, env_files: Sequence[Path | None], processes: int) -> Facts:
    """What must be equal on all machines, without secrets."""
    versions = {"python": ".".join(map(str, sys.version_info[:2])), **{name: _version(name) for name in PACKAGES}}
    versions["aitrain's code"] = _source_hash(PACKAGE / "__init__.py")
    options = {name: value for name, value in config.written().items() if name not in PER_NODE}
    return {
        "versions": versions,
        "environment": {"the environment's code": ", ".join(str(_source_hash(file)) for file in env_files)},
        "model": {"the model's files": _model_hash(Path(config.model).expanduser())},
        "processes": {"number of training processes": processes},
        "options": without_secrets(json.loads(json.dumps(options, default=str))),
    }


def difference(own: Facts, theirs: Facts) -> str:
    """The first facts that differ, as `trl 1.17.0 (node 0: 1.16.0)`; empty if none does."""
    for kind, values in own.items():
        others = theirs.get(kind)
        others = others if isinstance(others, dict) else {}
        found = [name for name in values if values[name] != others.get(name)]
        if found:
            shown = [f"{name} {_short(others.get(name))} (node 0: {_short(values[name])})" for name in found[:3]]
            return "; ".join([*shown, *(["..."] if len(found) > 3 else [])])
    return ""


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # here, because one machine needs none of it

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _source_hash(file: Path | None) -> str | None:
    """Of the environment's file, or of all modules of its package."""
    if file is None or not file.is_file():
        return None
    is_package = (file.parent / "__init__.py").exists()
    files = sorted(file.parent.rglob("*.py")) if is_package else [file]
    total = hashlib.sha256()
    for each in files:
        total.update(each.relative_to(file.parent).as_posix().encode() + b"\0" + each.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def _model_hash(folder: Path) -> str | None:
    """Of a local model: names and sizes of its files, and the content of the small ones."""
    if not folder.is_dir():
        return None
    total = hashlib.sha256()
    for file in sorted(file for file in folder.iterdir() if file.is_file()):
        size = file.stat().st_size
        total.update(f"{file.name} {size}\0".encode() + (file.read_bytes() if size < SMALL_FILE else b""))
    return total.hexdigest()[:12]


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
    """Called once a second with the state of another machine, in a thread."""
    on_lost: Callable[[str], None] = lambda why: None
    """Called when another machine is lost, in a thread."""
    lost: str = ""
    """Why the run cannot go on: another machine is lost."""
    _state: State = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Event = field(default_factory=threading.Event)
    _ended: set[int] = field(default_factory=set)
    """Machines that said that they have ended."""

    def __post_init__(self) -> None:
        now = time.monotonic()
        self._answered, self._beats, self._heard = now, dict[int, int | None](), dict.fromkeys(self.others, now)

    @property
    def others(self) -> list[int]:
        """The machines that this one hears: node 0 all others, and these only node 0."""
        return list(range(1, self.nodes.count)) if self.nodes.rank == 0 else [0]

    def name(self, rank: int) -> str:
        """`node 1 (nodeB, 10.77.0.2)`."""
        info = self.infos[rank]
        return f"node {rank} ({info.host}, {info.address})"

    # -- meeting

    def meet(self, own: Facts, gpus: int, seconds: float) -> None:
        """Wait for all machines, which must be equal; node 0 compares them.

        Raises:
            ConfigError: a machine does not come, or differs from node 0; all get the message.
        """
        identity = secrets.token_hex(8)
        hello = {"count": self.nodes.count, "host": socket.gethostname(), "gpus": gpus, "facts": own, "id": identity}
        if self.nodes.rank == 0:
            met = self._gather(hello, time.monotonic() + seconds, seconds)
        else:
            self.store.put(f"hello/{self.nodes.rank}", {**hello, "address": own_address(self.nodes.address)})
            said = self.store.wait("met", seconds + ANSWER_SECONDS)
            if said is None or "refused" in said:
                self._leave()
                why = f"node 0 at {self.nodes.place} does not answer\nSee the output there."
                raise ConfigError(said["refused"] if said else f"nnodes: {why}")
            met = said["machines"]
            if met[self.nodes.rank]["id"] != identity:
                raise ConfigError(f"node_rank: there is a node {self.nodes.rank} already\nGive each machine its own.")
        self.infos = [NodeInfo(rank, each["host"], each["address"], each["gpus"]) for rank, each in enumerate(met)]
        for work in (self._keep_beating, self._watch):
            threading.Thread(target=work, name="nodes", daemon=True).start()

    def _gather(self, own: Facts, deadline: float, seconds: float) -> list[Facts]:
        met = [own]
        try:
            for rank in self.others:
                hello = self.store.wait(f"hello/{rank}", deadline - time.monotonic())
                if hello is None:
                    why = f"node {rank} did not connect to {self.nodes.place} within {seconds:.0f} seconds"
                    raise ConfigError(f"nnodes: {why} (--ddp-timeout)\nStart the same command there.")
                self._compare(own, hello, f"node {rank} ({hello['host']}, {hello['address']})")
                met.append(hello)
        except BaseException as error:
            self.refuse(str(error) if isinstance(error, ConfigError) else "node 0 was stopped")
            raise
        own["address"] = own_address(met[1]["address"])  # its name may be a loopback address here, as Debian has it
        self.store.put("met", {"machines": [{**each, "facts": {}} for each in met]})
        return met

    def _compare(self, own: Facts, hello: Facts, name: str) -> None:
        if refused := hello["facts"].get("refused"):
            raise ConfigError(f"nnodes: {name} cannot run this command: {refused}")
        is_same_count = hello["count"] == self.nodes.count
        counts = f"nnodes {hello['count']} (node 0: {self.nodes.count})"
        if unequal := difference(own["facts"], hello["facts"]) if is_same_count else counts:
            raise ConfigError(f"nnodes: {name} differs from node 0: {unequal}\nMake the machines equal.")

    def refuse(self, why: str) -> None:
        """On node 0: tell the others that the run does not start, and give them a short time to read it."""
        self.store.put("met", {"refused": why})
        deadline = time.monotonic() + LEAVE_SECONDS
        for rank in self.others:
            self.store.wait(f"left/{rank}", deadline - time.monotonic())

    def _leave(self) -> None:
        """Say that the refusal was read."""
        with suppress(StoreLostError):
            self.store.put(f"left/{self.nodes.rank}", True)

    # -- the run folder

    def show_folder(self, folder: Path, checkpoint: Path | None, epoch: int = 0) -> None:
        """On node 0: tell the others the run folder, which all of them must see.

        Raises:
            ConfigError: one does not see it.
            RunFailed: one is gone.
        """
        proof = folder / f".seen-{secrets.token_hex(8)}"
        proof.touch()
        name = checkpoint.name if checkpoint else None
        told = {"path": str(folder.resolve()), "proof": proof.name, "checkpoint": name, "epoch": epoch}
        try:
            unseen = [self.name(rank) for rank, sees in self._tell_folder(told).items() if not sees]
        finally:
            proof.unlink(missing_ok=True)
        if unseen:
            raise not_shared(folder, " and ".join(unseen), "do not see" if len(unseen) > 1 else "does not see")

    def show_done(self) -> None:
        """On node 0: tell the others that the run had finished."""
        self._tell_folder({"done": True})

    def _tell_folder(self, told: Facts) -> dict[int, bool]:
        """What the others say to the run folder."""
        self.store.put("folder", told)
        said = {rank: self.store.wait(f"sees/{rank}", ANSWER_SECONDS, self.check) for rank in self.others}
        if silent := [rank for rank, sees in said.items() if sees is None]:
            raise RunFailed(f"{self.name(silent[0])} does not answer\nSee the output there.")
        return said

    def find_folder(self) -> SharedFolder | None:
        """On another machine: the run folder of node 0; None if the run had finished.

        Raises:
            ConfigError: this machine does not see it; node 0 is told.
            RunFailed: node 0 is gone.
        """
        said = self.store.wait("folder", math.inf, self.check)
        answer = f"sees/{self.nodes.rank}"
        if "done" in said:
            self.store.put(answer, True)
            return None
        path, deadline = Path(said["path"]), time.monotonic() + SEES_WITHIN
        while not (sees := (path / said["proof"]).exists()) and time.monotonic() < deadline:
            look_again(path)
            time.sleep(0.2)
        self.store.put(answer, sees)
        if not sees:
            raise not_shared(path, "this machine", "does not see")
        checkpoint = path / "checkpoints" / said["checkpoint"] if said["checkpoint"] else None
        return SharedFolder(path, checkpoint, said["epoch"])

    # -- during the run

    def check(self) -> None:
        """Raise RunFailed if another machine is lost, or has failed before the run began."""
        if self.lost:
            raise RunFailed(self.lost)

    def say(self, **fields: object) -> None:
        """Change the state of this machine, and tell the others at once."""
        self._state = {**self._state, **fields}
        self._changed.set()

    def leave(self) -> None:
        """Tell the others that this machine has ended, as a machine that is silent is lost."""
        if self._over.is_set():
            return
        self._over.set()
        telling = threading.Thread(target=self._say_over, name="nodes", daemon=True)
        telling.start()
        telling.join(LEAVE_SECONDS if not self.lost else BEAT)  # a connection that is cut blocks

    def _say_over(self) -> None:
        with suppress(StoreLostError):
            self.store.put(f"states/{self.nodes.rank}", {**self._state, "beat": -1, "over": True})

    def wait_for_others(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait until the machines that this one hears have ended or are lost, or `is_over`."""
        deadline = time.monotonic() + seconds
        while (
            not is_over() and not self.lost and time.monotonic() < deadline and not self._ended.issuperset(self.others)
        ):
            time.sleep(0.05)

    def _keep_beating(self) -> None:
        """Write the own state, and read those of others. It blocks for as long as a connection does."""
        beat = 0
        try:
            while not self._over.is_set():
                beat += 1
                self.store.put(f"states/{self.nodes.rank}", {**self._state, "beat": beat})
                for rank in self.others:
                    self._hear(rank, self.store.get(f"states/{rank}") or {})
                self._answered = time.monotonic()
                self._changed.wait(min(BEAT, self.silence / 8))
                self._changed.clear()
        except StoreLostError:
            self._lose(0)

    def _hear(self, rank: int, state: State) -> None:
        if state.get("beat") != self._beats.get(rank):
            self._beats[rank], self._heard[rank] = state.get("beat"), time.monotonic()
        if state.get("over"):
            self._ended.add(rank)
        if state:
            self.on_state(rank, state)

    def _watch(self) -> None:
        """Name the machine that is silent; node 0's store is local and always answers."""
        while not self._over.wait(min(BEAT, self.silence / 8)):
            now = time.monotonic()
            if now - self._answered > self.silence:
                self._lose(0)
            for rank in self.others:
                if rank not in self._ended and now - self._heard[rank] > self.silence:
                    self._lose(rank)

    def _lose(self, rank: int) -> None:
        if self._over.is_set() or self.lost or rank in self._ended:
            return
        self.lost = f"{self.name(rank)} is gone"
        self.on_lost(self.lost)


def silence(ddp_timeout: float) -> float:
    """Maximum seconds without a new state: less than a collective operation waits, which would only say that it timed
    out."""
    return min(SILENCE, ddp_timeout / 2)


@dataclass(frozen=True)
class SharedFolder:
    """The run folder on another machine than node 0."""

    path: Path
    checkpoint: Path | None
    epoch: int = 0


def look_again(folder: Path) -> None:
    """Make NFS look for files that were not there before."""
    for place in (folder.parent, folder):
        with suppress(OSError):
            os.listdir(place)


def not_shared(folder: Path, whom: str, verb: str) -> ConfigError:
    """The error on each machine if the run folder of node 0 is not on a file system that all of them share."""
    return ConfigError(
        f"output_dir: {whom} {verb} {folder} of node 0\n"
        "Let --output-dir be a folder on a file system that all machines share."
    )


# -- addresses


def own_address(other: str) -> str:
    """Address by which another machine reaches this one."""
    family, kind, _, _, place = socket.getaddrinfo(other, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as connection:
        connection.connect(place)  # sends nothing
        return str(connection.getsockname()[0])


def interface_variables(own_address: str) -> dict[str, str]:
    """Makes gloo use the network interface of the connection, as it would take the one of the host's name, which may be
    a loopback address; and NCCL as well in that case."""
    import psutil

    every = psutil.net_if_addrs().items()
    name = next((name for name, found in every if any(own_address == one.address for one in found)), None)
    if name is None:
        return {}
    try:
        is_loopback = socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        is_loopback = True
    return {"GLOO_SOCKET_IFNAME": name, **({"NCCL_SOCKET_IFNAME": name} if is_loopback else {})}
