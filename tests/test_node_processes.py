"""The parents of a run on two machines, both in this process, with scripts in place of the training processes."""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.errors import AitrainError
from aitrain.events import SERVER_VARIABLE, Ended, Event, Failed, Note, Started, encode
from aitrain.launch import node_processes, processes
from aitrain.launch.machines import Nodes
from aitrain.launch.node_link import NodeLink
from aitrain.launch.node_processes import FollowingProcesses, LeadingProcesses
from aitrain.launch.nodes import SharedFolder
from aitrain.runs.run_folder import RunFolder, read_object
from tests import test_nodes

links, port, soon = test_nodes.links, test_nodes.port, test_nodes.soon  # fixtures
READY = "touch $0/ready-$RANK"
WAIT = f"trap 'exit 0' TERM; {READY}; while :; do sleep 0.05; done"
END = Ended("finished", 3)


def says(*events: Event) -> str:
    """A script that sends events."""
    return "; ".join(f"echo {shlex.quote(encode(event).strip())}" for event in events)


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class WithScript:
    """A machine with a script in place of its training process."""

    script = WAIT

    def _command(self) -> list[str]:
        return ["bash", "-c", self.script, str(self.folder.path)]


class Leading(WithScript, LeadingProcesses):
    """Node 0, with rank 0."""


class Following(WithScript, FollowingProcesses):
    """The other machine, with rank 1."""


class Machines:
    """Two machines that have met."""

    def __init__(self, folder: Path, links: tuple[NodeLink, NodeLink]) -> None:
        self.folder, self.links, self.heard = RunFolder(folder), links, list[Event]()
        shared = SharedFolder(folder, None)
        self.first = Leading(self._plan(0), self.folder, self.heard.append, link=links[0])
        self.second = Following(self._plan(1), self.folder, lambda _: None, link=links[1], shared=shared)
        self.ends: list[Failed | Ended | BaseException | None] = [None, None]

    def _plan(self, rank: int) -> Any:
        batch, config = SimpleNamespace(processes=2), TrainConfig(model="tiny", stall_timeout=60.0)
        place = Nodes(2, rank, "127.0.0.1", 1)
        return SimpleNamespace(config=config, batch=batch, processes=1, gpus=(), checkpoint=None, nodes=place)

    def run(self, first: str, second: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Run both to their ends, with these scripts."""
        self.first.script, self.second.script = first, second
        threads = [
            threading.Thread(target=self._run, args=[n, m], daemon=True)
            for n, m in enumerate((self.first, self.second))
        ]
        for thread in threads:
            thread.start()
        meanwhile()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, node: int, processes: LeadingProcesses | FollowingProcesses) -> None:
        try:
            self.ends[node] = processes.run()
        except AitrainError as error:
            self.ends[node] = error

    def both_run(self) -> None:
        """Wait until the scripts of both say that they are ready."""
        wait_until(lambda: all((self.folder.path / f"ready-{rank}").exists() for rank in (0, 1)))

    def messages(self) -> list[str]:
        return [end.message if isinstance(end, Failed) else str(end) for end in self.ends]


@pytest.fixture
def machines(tmp_path: Path, links: tuple[NodeLink, NodeLink], monkeypatch: pytest.MonkeyPatch) -> Machines:
    monkeypatch.setattr(processes, "AFTER_FAILURE", 0.2)
    folder = tmp_path / "run"
    folder.mkdir()
    return Machines(folder, links)


def test_ranks_of_both_machines_are_consecutive_meet_know_node_0s_server_and_end_with_rank_0(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = {SERVER_VARIABLE: "http://nodeA:8000", "VLLM_API_KEY": "of the server"}
    monkeypatch.setattr(node_processes, "managed_server", lambda *_: nullcontext(server))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    show = "env > " + shlex.quote(str(machines.folder.path))
    machines.run(f"{show}/env-0; {says(Started(0, 1), Note('hello'), END)}", f"{show}/env-1; {says(Started(1, 1))}")
    assert machines.ends == [END, END]
    assert Note("hello") in machines.heard
    assert [node["rank"] for node in read_object(machines.folder.status)["nodes"]] == [0, 1]
    first, second = (
        dict(line.split("=", 1) for line in (machines.folder.path / f"env-{n}").read_text().splitlines() if "=" in line)
        for n in (0, 1)
    )
    port = first["MASTER_PORT"]
    assert [first[name] for name in names] == ["0", "0", "2", "1", "127.0.0.1", port, "lo"]
    assert [second[name] for name in names] == ["1", "0", "2", "1", "127.0.0.1", port, "lo"]
    assert server.items() <= second.items()
    assert [node["host"] for node in json.loads(first["AITRAIN_NODES"])] == [os.uname().nodename] * 2


def test_an_error_of_a_rank_elsewhere_ends_the_run_with_the_name_of_its_machine(machines: Machines) -> None:
    failed = Failed("No space left on device", 1)
    machines.run(says(Started(0, 1)), f"{says(failed)}; exit 1")
    first, second = machines.messages()
    assert first == f"{machines.links[0].peers[0].name}: No space left on device"
    assert second == "No space left on device"


@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_that_is_killed_ends_both_at_once_and_is_named(node: int, machines: Machines) -> None:
    scripts = [WAIT, WAIT]
    scripts[node] = "kill -KILL $$"
    machines.run(scripts[0], scripts[1])
    for message in machines.messages():
        assert f"Rank {node} of 2 ended without an error message: SIGKILL (out of memory?)" in message
    assert machines.messages()[node].startswith(f"Rank {node} of 2")
    other = machines.messages()[1 - node]
    assert other.startswith(machines.links[1 - node].peers[0].name)


@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_on_one_machine_reaches_the_ranks_of_all(node: int, machines: Machines) -> None:
    stopped = Ended("stopped", 2)
    script = f"trap {shlex.quote(says(stopped) + '; exit 0')} TERM; {READY}; while :; do sleep 0.05; done"

    def stop() -> None:
        machines.both_run()
        (machines.first if node == 0 else machines.second).stop()

    machines.run(script, WAIT, stop)
    assert machines.ends == [stopped, stopped]
