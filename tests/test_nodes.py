"""Machines that meet as one run: which they are, what must be equal, which are let in and which are lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.errors import AitrainError, RunFailed
from aitrain.launch import nodes
from aitrain.launch.machines import LaunchedRank, Nodes, find_nodes, launched_rank
from aitrain.launch.nodes import MachineStore, NodeGroup, difference, facts, open_store
from aitrain.launch.preflight import check
from aitrain.runs.run_folder import RunFolder, read_object
from tests.conftest import free_port, write

FACTS = {"trl": "1.0", "lr": 1.0}


def variables(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


SLURM = variables(
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NODEID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2"
    " SLURM_STEP_NODELIST=gpu[07,12]"
)
MPI = variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2"
)
TORCHRUN = variables(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=nodeA MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none"
    " TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2"
)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for long."""
    monkeypatch.setattr(nodes, "POLL", 0.01)
    monkeypatch.setattr(nodes, "SEES_WITHIN", 0.05)
    monkeypatch.setattr(nodes, "LEAVE_SECONDS", 1.0)


@pytest.fixture
def stores() -> list[MachineStore]:
    """The store of two machines, as each of them sees it."""
    port = free_port()
    return [open_store(Nodes(2, rank, "127.0.0.1", port), 20.0) for rank in (0, 1)]


def beside(call: Callable[[], Any]) -> Future[Any]:
    """What a call returns or raises in another thread, which does not keep the tests from ending."""
    done = Future[Any]()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def group_of(stores: list[MachineStore], rank: int, count: int = 2) -> NodeGroup:
    return NodeGroup(Nodes(count, rank, "127.0.0.1", 1), stores[rank], silence=2.0)


@pytest.fixture
def pair(stores: list[MachineStore]) -> Iterator[tuple[NodeGroup, NodeGroup]]:
    """Two machines that have met."""
    first, second = group_of(stores, 0), group_of(stores, 1)
    other = beside(lambda: second.meet(FACTS, 3, 20.0))
    first.meet(FACTS, 2, 20.0)
    other.result(20)
    yield first, second
    second.leave()
    first.leave()


# -- which machines


@pytest.mark.parametrize(
    ("options", "environ", "found"),
    [
        ({}, SLURM, Nodes(2, 1, "gpu07", 20049)),
        ({"master_port": 7000}, SLURM, Nodes(2, 1, "gpu07", 7000)),
        ({}, {**SLURM, "SLURM_STEP_ID": "1"}, Nodes(2, 1, "gpu07", 20050)),  # steps of a job may share a machine
        ({}, {**SLURM, "PMI_SIZE": "2", "PMI_RANK": "1"}, Nodes(2, 1, "gpu07", 20049)),
        ({"nnodes": 1}, SLURM, None),
        ({}, SLURM | variables("SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NUM_NODES=1"), None),
        # as the operators of Kubernetes set them
        ({}, variables("RANK=2 WORLD_SIZE=3 MASTER_ADDR=job-0 MASTER_PORT=234"), Nodes(3, 2, "job-0", 234)),
        ({}, variables("WORLD_SIZE=1 RANK=0 LOCAL_RANK=0"), None),
        ({"nnodes": 3, "node_rank": 2, "master_addr": "a"}, {}, Nodes(3, 2, "a", 29400)),
        ({}, {}, None),
    ],
)
def test_the_machines_are_those_of_the_flags_or_of_the_launcher(
    options: dict[str, Any], environ: dict[str, str], found: Nodes | None
) -> None:
    assert find_nodes(TrainConfig(**options), environ) == found


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (TORCHRUN, LaunchedRank(3, 4, 1, 2, "nodeA", 29500, has_store=True, restarts=2)),
        (variables("RANK=1 WORLD_SIZE=3 MASTER_ADDR=job-0"), None),  # one command on each machine
        (variables("WORLD_SIZE=1 RANK=0 LOCAL_RANK=0"), None),
        (SLURM, None),
        (
            SLURM | variables("SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=2 SLURM_PROCID=3"),  # dealt out cyclically
            LaunchedRank(6, 8, 2, 4, "gpu07", 20049),
        ),
        (variables("SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=8"), None),  # no srun
        ({**MPI, "MASTER_PORT": "1234"}, LaunchedRank(1, 2, 1, 2, "127.0.0.1", 1234)),
        (
            variables("PMI_RANK=3 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 MASTER_ADDR=a"),
            LaunchedRank(3, 4, 1, 2, "a", 29400),
        ),
    ],
)
def test_a_process_knows_its_rank_by_the_variables_of_the_program_that_started_it(
    environ: dict[str, str], found: LaunchedRank | None
) -> None:
    assert launched_rank(environ) == found


def test_the_first_machine_of_a_slurm_job_is_read() -> None:
    for listed, first in (("gpu[01-03,7],login", "gpu01"), ("r[1-2]n[08-09]", "r1n08"), ("login,gpu1", "login")):
        found = find_nodes(TrainConfig(), {**SLURM, "SLURM_STEP_NODELIST": listed})
        assert found.address == first


@pytest.mark.parametrize(
    ("options", "environ", "word"),
    [
        ({}, {**SLURM, "SLURM_STEP_NUM_TASKS": "7"}, "same number on each"),
        ({"nnodes": 2}, variables("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0"), "nnodes: a launcher"),
        ({}, {**MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR"),
        ({}, variables("RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2"), "MASTER_ADDR"),
        ({}, {**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "consecutive ranks"),
        ({}, variables("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 ACCELERATE_USE_FSDP=true"), "fsdp2"),
        ({"nnodes": 2, "master_addr": "a"}, {}, "node_rank"),
        ({"nnodes": 2, "node_rank": 1}, {}, "master_addr"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, {}, "0 to 1"),
        ({"node_rank": 1}, {}, "nnodes"),
    ],
)
def test_what_does_not_say_which_machines_or_starts_several_commands_on_one_is_refused(
    options: dict[str, Any], environ: dict[str, str], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        find_nodes(TrainConfig(**options), environ)


def test_the_batch_is_that_of_all_machines_and_only_node_0_looks_for_a_checkpoint(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"model": "tiny", "rl_env": "envs.arithmetic", "num_processes": 2, "nnodes": 3}
    first, second = (
        TrainConfig(**options, node_rank=rank, master_addr="a", resume_from_checkpoint="auto") for rank in (0, 1)
    )
    plan = check(second)
    assert plan.folder is None
    assert check(first).folder is not None
    assert (plan.batch.processes, plan.processes, plan.nodes) == (6, 2, Nodes(3, 1, "a", 29400))
    monkeypatch.setattr("aitrain.launch.preflight.installed", lambda name: object())
    with pytest.raises(ConfigError, match="vllm-server-url"):
        check(TrainConfig(**first.changed(), use_vllm=True, vllm_mode="server"))


# -- what must be equal


def test_what_differs_is_named_with_both_values(tmp_path: Path) -> None:
    write(tmp_path, {"env.py": "import judge", "judge.py": "", "config.json": ""})
    given: dict[str, Any] = {"lr": 1e-5, "model": str(tmp_path)}

    def of_this_machine(processes: int = 2, **options: Any) -> dict[str, Any]:
        return facts(TrainConfig(**(given | options)), [tmp_path / "env.py"], processes)

    own = of_this_machine(node_rank=0, output_dir="here")
    assert difference(own, of_this_machine(node_rank=1, output_dir="there")) == ""
    assert difference(own, of_this_machine(1)) == "number of training processes 1 (node 0: 2)"
    assert difference(own, {**own, "trl": "0.9"}) == f"trl 0.9 (node 0: {own['trl']})"
    assert difference(own, {}) != ""
    (tmp_path / "config.json").write_text("[]")
    assert difference(own, of_this_machine()).startswith("the model's files ")
    (tmp_path / "judge.py").write_text("stricter = True")  # which the environment imports
    assert difference(own, of_this_machine()).startswith("the environment's code ")


# -- meeting


@pytest.mark.parametrize(
    ("count", "options", "says"),
    [(2, {"lr": 2.0}, r"lr 2.0 \(node 0: 1.0\)"), (3, {"lr": 1.0}, r"nnodes 3 \(node 0: 2\)")],
)
def test_a_machine_that_differs_ends_the_start_on_both_with_the_same_sentence(
    count: int, options: dict[str, Any], says: str, stores: list[MachineStore]
) -> None:
    other = beside(lambda: group_of(stores, 1, count).meet({**FACTS, **options}, 0, 20.0))
    first = group_of(stores, 0)
    with pytest.raises(ConfigError, match=rf"node 1 \(.*\) differs from node 0: {says}") as own:
        first.meet(FACTS, 0, 20.0)
    first.refuse(own.value)
    with pytest.raises(AitrainError) as theirs:
        other.result(20)
    assert str(theirs.value) == f"node 0: {own.value}"


def test_a_machine_that_does_not_come_is_named(stores: list[MachineStore]) -> None:
    with pytest.raises(ConfigError, match=r"node 1 did not connect to 127.0.0.1:1 within 0 seconds \(--ddp-timeout\)"):
        group_of(stores, 0).meet(FACTS, 0, 0.1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_whose_checks_refuse_the_command_tells_the_other_one(rank: int, stores: list[MachineStore]) -> None:
    waiting = beside(lambda: group_of(stores, 1 - rank).meet(FACTS, 0, 20.0))
    group_of(stores, rank).refuse(ConfigError("model: not here\nMove it."))
    with pytest.raises(AitrainError, match=rf"^node {rank}: model: not here\nMove it.$"):
        waiting.result(20)


def test_a_port_that_is_in_use_and_a_node_0_that_is_not_there_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"master_port: port {port} cannot be used"):
            open_store(Nodes(2, 0, "127.0.0.1", port), 1.0)
    with pytest.raises(ConfigError, match=f"node 0 does not answer at 127.0.0.1:{port}"):
        open_store(Nodes(2, 1, "127.0.0.1", port), 0.1)


def test_the_store_of_one_machine_listens_on_that_machine_only() -> None:
    def listening() -> set[Any]:
        return {each.laddr for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"}

    before = listening()
    store = open_store(Nodes(2, 0, "127.0.0.1", free_port()), 20.0)
    store.put("listens", True)
    assert {each.ip for each in listening() - before} == {"127.0.0.1"}


# -- the run folder


def test_the_run_folder_that_all_machines_see_is_agreed_on(pair: tuple[NodeGroup, NodeGroup], tmp_path: Path) -> None:
    finding = beside(pair[1].find_folder)
    pair[0].show_folder(RunFolder(tmp_path, epoch=3), tmp_path / "checkpoints" / "checkpoint-4", 2)

    assert finding.result(20) == (RunFolder(tmp_path, epoch=3), tmp_path / "checkpoints" / "checkpoint-4")
    assert [node["processes"] for node in read_object(tmp_path / "status.json")["nodes"]] == [2, 2]


def test_a_run_that_had_finished_is_told(pair: tuple[NodeGroup, NodeGroup]) -> None:
    finding = beside(pair[1].find_folder)
    pair[0].say(folder={})
    assert finding.result(20) is None


def test_a_run_folder_that_one_machine_does_not_see_is_refused_on_both(
    pair: tuple[NodeGroup, NodeGroup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "read_object", lambda file: {"nodes": []})  # a folder of the same path
    pair[0].show_folder(RunFolder(tmp_path), None, 1)
    with pytest.raises(ConfigError, match="output_dir: this machine does not see") as caught:
        pair[1].find_folder()
    pair[1].refuse(caught.value)
    with pytest.raises(AitrainError, match=r"node 1 \(.*\): output_dir: this machine does not see"):
        pair[0].hear(1, "anything")


# -- lost machines


def test_a_machine_that_is_silent_is_named(pair: tuple[NodeGroup, NodeGroup]) -> None:
    lost: list[str] = []
    pair[0].on_lost = lost.append
    pair[1]._over.set()  # without a word
    pair[1]._changed.set()
    with pytest.raises(RunFailed, match=r"node 1 \(.*, 127.0.0.1\) is gone"):
        pair[0].hear(1, "anything")
    assert lost == [pair[0].lost]


def test_a_machine_that_has_ended_is_not_lost(pair: tuple[NodeGroup, NodeGroup]) -> None:
    pair[1].leave()
    time.sleep(2.5)  # its silence is 2 s
    assert pair[0].lost == ""
