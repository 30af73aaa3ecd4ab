"""The parents of a run on two machines, both in this process, with scripts in place of the training processes."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.errors import AitrainError
from aitrain.events import Ended, Event, Failed, Note, encode
from aitrain.launch import processes
from aitrain.launch.nodes import NodeGroup
from aitrain.launch.processes import Processes
from aitrain.runs.run_folder import RunFolder
from tests import test_nodes
from tests.execution.waiting import eventually

soon, stores, pair = test_nodes.soon, test_nodes.stores, test_nodes.pair

READY = "touch $0/ready-$RANK"
WAIT = f"trap 'exit 0' TERM; {READY}; while :; do sleep 0.05; done"
END = Ended("finished", 3)


def says(*events: Event) -> str:
    """A script that sends events."""
    return "; ".join(f"echo {shlex.quote(encode(event).strip())}" for event in events)


class Script(Processes):
    """The parent of one machine, with a script as its rank."""

    script = WAIT

    def _command(self) -> list[str]:
        return ["bash", "-c", self.script, str(self.folder.path)]


class Machines:
    """Two machines that have met."""

    def __init__(self, folder: Path, groups: tuple[NodeGroup, NodeGroup]) -> None:
        self.folder, self.groups, self.heard = RunFolder(folder), groups, list[Event]()
        self.first = Script(self._plan(0), self.folder, self.heard.append, groups[0])
        self.second = Script(self._plan(1), self.folder, lambda _: None, groups[1])
        self.ends: list[Failed | Ended | BaseException | None] = [None, None]

    def _plan(self, rank: int) -> Any:
        batch, config = SimpleNamespace(processes=2), TrainConfig(model="tiny", stall_timeout=60.0)
        more = {"gpus": (), "checkpoint": None, "nodes": self.groups[rank].nodes, "launched": None}
        return SimpleNamespace(config=config, batch=batch, processes=1, **more)

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

    def _run(self, node: int, processes: Processes) -> None:
        try:
            self.ends[node] = processes.run()
        except AitrainError as error:
            self.ends[node] = error
        finally:
            self.groups[node].leave()

    def both_run(self) -> None:
        """Wait until the scripts of both say that they are ready."""
        assert eventually(lambda: all((self.folder.path / f"ready-{rank}").exists() for rank in (0, 1)))

    def messages(self) -> list[str]:
        return [end.message if isinstance(end, Failed) else str(end) for end in self.ends]


@pytest.fixture
def machines(pair: tuple[NodeGroup, NodeGroup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    monkeypatch.setattr(processes, "AFTER_FAILURE", 0.2)
    folder = tmp_path / "run"
    folder.mkdir()
    return Machines(folder, pair)


def test_ranks_and_where_they_meet_are_consecutive_over_the_machines(machines: Machines) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    show = "env > " + shlex.quote(str(machines.folder.path))
    machines.run(f"{show}/env-0; {says(Note('hello'), END)}", f"{show}/env-1")
    assert machines.ends == [END, END]
    first, second = (
        dict(line.split("=", 1) for line in (machines.folder.path / f"env-{n}").read_text().splitlines() if "=" in line)
        for n in (0, 1)
    )
    port = first["MASTER_PORT"]
    assert [first[name] for name in names] == ["0", "0", "2", "1", "127.0.0.1", port, "lo"]
    assert [second[name] for name in names] == ["1", "0", "2", "1", "127.0.0.1", port, "lo"]


def test_an_error_of_a_rank_elsewhere_ends_the_run_with_the_name_of_its_machine(machines: Machines) -> None:
    failed = Failed("No space left on device", 1)
    machines.run("true", f"{says(failed)}; exit 1")
    first, second = machines.messages()
    assert first == f"{machines.groups[0].name(1)}: No space left on device"
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
    assert other.startswith(machines.groups[0].name(node))


def test_the_error_of_a_rank_is_the_end_though_another_one_crashes_after_it(tmp_path: Path) -> None:
    config, batch = TrainConfig(model="tiny"), SimpleNamespace(processes=2)
    more: dict[str, Any] = {"gpus": (), "checkpoint": None, "nodes": None, "launched": None}
    plan: Any = SimpleNamespace(config=config, batch=batch, processes=2, **more)
    failed = Failed("No space left on device", 1)
    ranks = Script(plan, RunFolder(tmp_path), lambda _: None)
    ranks.script = f"[ $RANK = 1 ] && sleep 1 && kill -SEGV $$; {says(failed)}; exit 1"
    assert ranks.run() == failed


@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_on_one_machine_reaches_the_ranks_of_all(node: int, machines: Machines) -> None:
    stopped = Ended("stopped", 2)
    script = f"trap {shlex.quote(says(stopped) + '; exit 0')} TERM; {READY}; while :; do sleep 0.05; done"

    def stop() -> None:
        machines.both_run()
        (machines.first if node == 0 else machines.second).stop()

    machines.run(script, WAIT, stop)
    assert machines.ends == [stopped, stopped]


def test_one_signal_on_each_machine_is_one_request_to_stop(machines: Machines) -> None:
    stopped = Ended("stopped", 2)
    saves = f"touch $0/saving; while [ ! -e $0/signalled ]; do sleep 0.05; done; {says(stopped)}; exit 0"
    script = f"trap {shlex.quote(saves)} TERM; {READY}; while :; do sleep 0.05; done"

    def signal_both() -> None:
        machines.both_run()
        machines.second._on_signal()
        assert eventually((machines.folder.path / "saving").exists)  # the first one has heard of it
        machines.first._on_signal()
        (machines.folder.path / "signalled").touch()

    machines.run(script, WAIT, signal_both)
    assert machines.ends == [stopped, stopped]
