"""Several machines as one run: which they are, what must be equal on all of them, and the folder that they share.

The command runs on each machine and keeps a connection to that of node 0 (`launch/node_link.py`). Before anything is
started, all agree on versions, options and environment, and node 0 learns which machines see its run folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aitrain.errors import ConfigError, RunFailed
from aitrain.launch.machines import Nodes
from aitrain.launch.node_link import (
    SILENCE,
    LinkError,
    Message,
    NodeLink,
    Peer,
    WrongTokenError,
    demand_proof,
    prove_to_node_0,
)
from aitrain.launch.node_token import TOKEN_VARIABLE, read_token, refused_token, shared_token
from aitrain.options.train import TrainConfig
from aitrain.packages import PACKAGE
from aitrain.redaction import without_secrets

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft")
"""Packages whose versions must be equal."""
PER_NODE = {"node_rank", "output_dir", "project_name", "resume_from_checkpoint"}
"""Options that may differ between machines; the others' values of the last three are not used."""
SMALL_FILE = 1 << 20
"""Bytes below which a file of a model is compared by its content: configurations, not weights."""
TRY_EVERY = 0.5
TOKEN_SECONDS = 10.0
"""Seconds in which the token must be accepted, from when node 0 answers: its file may appear late."""
SEES_WITHIN = 5.0
"""Seconds for a file to appear on the other machines; network file systems are late."""
ANSWER_SECONDS = 120.0
"""Seconds for the answers while machines agree; libraries on a network file system load slowly."""


# -- what must be equal


def facts(config: TrainConfig, env_files: Sequence[Path | None], processes: int) -> Message:
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


def difference(own: Message, theirs: Message) -> str:
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


# -- meeting


def gather_nodes(nodes: Nodes, own: Message, folder: Path, seconds: float) -> NodeLink:
    """On node 0: wait for all others, and compare what must be equal.

    Raises:
        ConfigError: the port is in use, or a machine does not connect or differs from node 0; all get the message.
    """
    met: dict[int, Peer] = {}
    try:
        with _listening(nodes) as server, shared_token(nodes.place, folder) as token:
            arrived: queue.Queue[tuple[Peer, Message]] = queue.Queue()
            refused: list[str] = []
            accept = partial(_accept, server, token, arrived.put, refused.append)
            threading.Thread(target=accept, name="node-accept", daemon=True).start()
            deadline = time.monotonic() + seconds
            while len(_without_gone(met)) < nodes.count - 1:
                try:
                    peer, hello = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    missing = ", ".join(str(rank) for rank in range(1, nodes.count) if rank not in met)
                    why = f"node {missing} did not connect to {nodes.place} within {seconds:.0f} seconds"
                    token = f", with the {TOKEN_VARIABLE} of this machine" if refused else ""
                    hint = f"Start the same command there{token}."
                    raise ConfigError(f"nnodes: {why} (--ddp-timeout)\n{hint}") from None
                _admit(nodes, own, met, peer, hello)
    except ConfigError as error:
        _refuse(met.values(), str(error))
        raise
    except BaseException:
        _refuse(met.values(), "node 0 was stopped")
        raise
    link = NodeLink([met[rank] for rank in sorted(met)], silence(seconds))
    link.tell("agreed")
    return link


def _admit(nodes: Nodes, own: Message, met: dict[int, Peer], peer: Peer, hello: Message) -> None:
    rank, count = hello.get("rank"), hello.get("count")
    peer.gpus = hello["gpus"] if isinstance(hello.get("gpus"), int) else 0
    peer.node, peer.host = rank if isinstance(rank, int) else -1, str(hello.get("host"))[:64]
    if not 0 < peer.node < nodes.count or peer.node in _without_gone(met):
        _refuse([peer], f"node_rank: there is a node {peer.node} already")
        return
    met[peer.node] = peer
    if refused := hello["facts"].get("refused"):
        raise ConfigError(f"nnodes: {peer.name} cannot run this command: {refused}")
    unequal = f"nnodes {count} (node 0: {nodes.count})" if count != nodes.count else difference(own, hello["facts"])
    if unequal:
        raise ConfigError(f"nnodes: {peer.name} differs from node 0: {unequal}\nMake the machines equal.")


def _without_gone(met: dict[int, Peer]) -> dict[int, Peer]:
    """The machines that have come, after removing those that have ended since; they may come again."""
    for rank in [rank for rank, peer in met.items() if peer.is_gone()]:
        met.pop(rank).close()
    return met


def _refuse(peers: Iterable[Peer], why: str) -> None:
    for peer in peers:
        with suppress(LinkError):
            peer.send({"kind": "refused", "why": why})
        peer.close()


@contextmanager
def _listening(nodes: Nodes) -> Iterator[socket.socket]:
    """Listen on all addresses: node 0's own name may be a loopback address here, as Debian has it."""
    is_local = nodes.address in ("127.0.0.1", "localhost")
    family = socket.AF_INET6 if ":" in nodes.address else socket.AF_INET
    try:
        server = socket.create_server(("127.0.0.1" if is_local else "", nodes.port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(
            f"master_port: port {nodes.port} cannot be used on this machine: {error.strerror}\n"
            "Choose another with --master-port, on all machines."
        ) from None
    with server:
        try:
            yield server
        finally:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts; closing alone does not


def _accept(
    server: socket.socket,
    token: str,
    arrive: Callable[[tuple[Peer, Message]], None],
    refuse: Callable[[str], None],
) -> None:
    """Accept connections until the server is closed, each in a thread, as it may say nothing."""

    def greet(connection: socket.socket) -> None:
        peer = Peer(connection)
        try:
            demand_proof(peer, token)
            hello = peer.receive(ANSWER_SECONDS)
            if isinstance(hello.get("facts"), dict):
                arrive((peer, hello))
                return
        except WrongTokenError:
            refuse(peer.address)
        except LinkError:
            pass  # not a command of ours, or it has no token yet and tries again
        peer.close()

    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            threading.Thread(target=greet, args=[connection], name="node-greet", daemon=True).start()


def join_node_0(nodes: Nodes, own: Message, folder: Path, seconds: float, gpus: int = 0) -> NodeLink:
    """On another machine: connect to node 0, and wait until all have agreed.

    Raises:
        ConfigError: node 0 does not answer, the tokens differ, or the machines are not equal.
    """
    peer = _connect(nodes, folder, seconds)
    try:
        peer.send({"rank": nodes.rank, "count": nodes.count, "host": socket.gethostname(), "gpus": gpus, "facts": own})
        answer = peer.receive(seconds)
    except LinkError as error:
        raise RunFailed(f"{error}\nSee the output there.") from None
    if answer.get("kind") != "agreed":
        raise ConfigError(str(answer.get("why")))
    return NodeLink([peer], silence(seconds))


def _connect(nodes: Nodes, folder: Path, seconds: float) -> Peer:
    deadline, why = time.monotonic() + seconds, ""
    refused_since: float | None = None
    while time.monotonic() < deadline:
        try:
            peer = Peer(socket.create_connection((nodes.address, nodes.port), timeout=5.0))
        except OSError as error:
            why = error.strerror or str(error)
        else:
            if (token := read_token(nodes.place, folder)) is not None:
                with suppress(LinkError):
                    prove_to_node_0(peer, token)
                    return peer
            peer.close()
            refused_since = refused_since or time.monotonic()
            if time.monotonic() - refused_since > TOKEN_SECONDS:
                break
        time.sleep(TRY_EVERY)
    if refused_since is not None:
        raise refused_token(nodes.place, folder)
    raise ConfigError(
        f"master_addr: node 0 does not answer at {nodes.place}: {why}\nStart the command with --node-rank 0 there."
    )


def silence(ddp_timeout: float) -> float:
    """Maximum seconds without a heartbeat: less than a collective operation waits, which would only say that it timed
    out."""
    return min(SILENCE, ddp_timeout / 2)


# -- the run folder


def show_folder(link: NodeLink, folder: Path, checkpoint: Path | None, epoch: int = 0) -> None:
    """On node 0: tell the others the run folder, which all of them must see.

    Raises:
        ConfigError: one does not see it.
        RunFailed: one is gone.
    """
    proof = folder / f".seen-{secrets.token_hex(8)}"
    proof.touch()
    name = checkpoint.name if checkpoint else None
    link.tell("folder", path=str(folder.resolve()), proof=proof.name, checkpoint=name, epoch=epoch)
    try:
        unseen = [peer.name for peer in link.peers if not _answer(peer, "sees").get("sees")]
    finally:
        proof.unlink(missing_ok=True)
    if unseen:
        raise not_shared(folder, " and ".join(unseen), "do not see" if len(unseen) > 1 else "does not see")


@dataclass(frozen=True)
class SharedFolder:
    """The run folder on another machine than node 0."""

    path: Path
    checkpoint: Path | None
    epoch: int = 0


def find_folder(link: NodeLink) -> SharedFolder | None:
    """On another machine: the run folder of node 0; None if the run had finished.

    Raises:
        ConfigError: this machine does not see it; node 0 is told.
        RunFailed: node 0 is gone.
    """
    said = _answer(link.peers[0], "folder", "done")
    if said["kind"] == "done":
        return None
    path, deadline = Path(said["path"]), time.monotonic() + SEES_WITHIN
    while not (sees := (path / said["proof"]).exists()) and time.monotonic() < deadline:
        for folder in (path.parent, path):
            with suppress(OSError):
                os.listdir(folder)  # makes NFS look again
        time.sleep(0.2)
    link.tell("sees", sees=sees)
    if not sees:
        raise not_shared(path, "this machine", "does not see")
    checkpoint = path / "checkpoints" / said["checkpoint"] if said["checkpoint"] else None
    return SharedFolder(path, checkpoint, said["epoch"])


def not_shared(folder: Path, whom: str, verb: str) -> ConfigError:
    """The error on each machine if the run folder of node 0 is not on a file system that all of them share."""
    return ConfigError(
        f"output_dir: {whom} {verb} {folder} of node 0\n"
        "Let --output-dir be a folder on a file system that all machines share."
    )


def _answer(peer: Peer, *kinds: str) -> Message:
    try:
        answer = peer.receive(ANSWER_SECONDS)
    except LinkError as error:
        raise RunFailed(str(error)) from None
    if answer.get("kind") not in kinds:
        raise RunFailed(f"{peer.name} ended: {answer.get('why', 'it was stopped')}")
    return answer


# -- addresses


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
