"""Machines that meet as one run: which they are, what must be equal, which are let in and which are lost."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.cli.node_run import report_refusal
from aitrain.errors import AitrainError
from aitrain.launch import nodes
from aitrain.launch.machines import LaunchedRank, Nodes, expand, find_nodes, idle_nodes, launched_rank
from aitrain.launch.node_link import NodeLink
from aitrain.launch.node_token import TOKEN_VARIABLE, read_token
from aitrain.launch.nodes import (
    SharedFolder,
    difference,
    facts,
    find_folder,
    gather_nodes,
    join_node_0,
    show_folder,
)
from aitrain.launch.preflight import check
from aitrain.launch.processes import process_variables
from tests.conftest import write

FACTS = {"versions": {"trl": "1.0"}, "options": {"lr": 1.0}}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[07,12]",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for long."""
    monkeypatch.setattr(nodes, "TRY_EVERY", 0.01)
    monkeypatch.setattr(nodes, "SEES_WITHIN", 0.05)
    monkeypatch.setattr(nodes, "TOKEN_SECONDS", 0.2)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def beside(call: Callable[[], Any]) -> Future[Any]:
    """What a call in another thread returns or raises."""
    made: Future[Any] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return made


def of(rank: int, port: int) -> Nodes:
    return Nodes(2, rank, "127.0.0.1", port)


@pytest.fixture
def links(tmp_path: Path, port: int) -> Iterator[tuple[NodeLink, NodeLink]]:
    """The connections of two machines that have met."""
    other = beside(lambda: join_node_0(of(1, port), FACTS, tmp_path, 20.0, gpus=3))
    pair = gather_nodes(of(0, port), FACTS, tmp_path, 20.0), other.result()
    yield pair
    for link in pair:
        link.close()


# -- which machines


@pytest.mark.parametrize(
    ("options", "environ", "found"),
    [
        ({}, SLURM, Nodes(2, 1, "gpu07", 20049)),
        ({}, {**SLURM, "SLURM_STEP_ID": "1"}, Nodes(2, 1, "gpu07", 20050)),  # steps of a job may share a machine
        ({"nnodes": 1}, SLURM, None),
        # as the operators of Kubernetes set them
        ({}, {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0", "MASTER_PORT": "234"}, Nodes(3, 2, "job-0", 234)),
        ({"nnodes": 3, "node_rank": 2, "master_addr": "a"}, {}, Nodes(3, 2, "a", 29400)),
    ],
)
def test_the_machines_are_those_of_the_flags_or_of_the_launcher(
    options: dict[str, Any], environ: dict[str, str], found: Nodes | None
) -> None:
    assert find_nodes(TrainConfig(**options), environ) == found


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "nodeA",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (TORCHRUN, LaunchedRank(3, 4, 1, 2, "nodeA", 29500, has_store=True, restarts=2)),
        ({"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0"}, None),  # one command on each machine
        ({"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, None),
        (SLURM, None),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "2", "SLURM_PROCID": "3"},  # dealt out cyclically
            LaunchedRank(6, 8, 2, 4, "gpu07", 20049),
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, None),  # no srun
        ({**MPI, "MASTER_PORT": "1234"}, LaunchedRank(1, 2, 1, 2, "127.0.0.1", 1234)),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "a"},
            LaunchedRank(3, 4, 1, 2, "a", 29400),
        ),
    ],
)
def test_a_process_knows_its_rank_by_the_variables_of_the_program_that_started_it(
    environ: dict[str, str], found: LaunchedRank | None
) -> None:
    assert launched_rank(environ) == found


def test_names_and_idle_machines_of_a_slurm_job_are_read() -> None:
    assert expand("r[1-2]n[08-09,7],login") == ["r1n08", "r1n09", "r1n7", "r2n08", "r2n09", "r2n7", "login"]
    assert idle_nodes({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4"}) == 3
    assert idle_nodes({**SLURM, "SLURM_JOB_NUM_NODES": "4"}) == 0


@pytest.mark.parametrize(
    ("options", "environ", "word"),
    [
        ({}, {**SLURM, "SLURM_STEP_NUM_TASKS": "7"}, "same number on each"),
        ({"nnodes": 2}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "nnodes: a launcher"),
        ({}, {**MPI, "OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR"),
        ({}, {**MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "consecutive ranks"),
        ({}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "ACCELERATE_USE_FSDP": "true"}, "fsdp2"),
        ({"nnodes": 2, "master_addr": "a"}, {}, "node_rank"),
    ],
)
def test_what_does_not_say_which_machines_or_starts_several_commands_on_one_is_refused(
    options: dict[str, Any], environ: dict[str, str], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        find_nodes(TrainConfig(**options), environ)


# -- what must be equal


def test_what_differs_is_named_with_both_values(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(["__init__.py", "env.py", "judge.py", "config.json"], ""))
    given: dict[str, Any] = {"lr": 1e-5, "model": str(tmp_path)}

    def of_this_machine(**options: Any) -> dict[str, Any]:
        return facts(TrainConfig(**(given | options)), [tmp_path / "env.py"], 2)

    own = of_this_machine(node_rank=0, output_dir="here")
    assert difference(own, of_this_machine(node_rank=1, output_dir="there")) == ""
    assert difference(own, of_this_machine(lr=2e-5)) == "lr 2e-05 (node 0: 1e-05)"
    older = {**own, "versions": {**own["versions"], "trl": "0.9"}}
    assert difference(own, older) == f"trl 0.9 (node 0: {own['versions']['trl']})"
    (tmp_path / "config.json").write_text("[]")
    assert difference(own, of_this_machine()).startswith("the model's files ")
    (tmp_path / "judge.py").write_text("stricter = True")  # a module of the environment's package
    assert difference(own, of_this_machine()).startswith("the environment's code ")
    assert "very-secret" not in str(of_this_machine(rl_env_config={"api_key": "very-secret"}))


# -- meeting


def test_machines_that_are_equal_meet_by_a_token_that_only_its_owner_can_read(tmp_path: Path, port: int) -> None:
    gathering = beside(lambda: gather_nodes(of(0, port), FACTS, tmp_path / "runs", 20.0))
    while not (made := list(tmp_path.glob("runs/.nodes-????????????"))):
        time.sleep(0.01)
    assert stat.S_IMODE(made[0].stat().st_mode) == 0o600
    assert len(read_token(of(0, port).place, tmp_path / "runs") or "") == 64
    join_node_0(of(1, port), FACTS, tmp_path / "runs", 20.0, gpus=3).close()
    leading = gathering.result()
    assert [(peer.node, peer.address, peer.gpus) for peer in leading.peers] == [(1, "127.0.0.1", 3)]
    assert list((tmp_path / "runs").iterdir()) == []
    leading.close()


def test_a_machine_that_differs_ends_the_start_on_both_with_the_same_sentence(tmp_path: Path, port: int) -> None:
    other = beside(lambda: join_node_0(Nodes(3, 1, "127.0.0.1", port), FACTS, tmp_path, 20.0))
    with pytest.raises(ConfigError, match=r"node 1 \(.*\) differs from node 0: nnodes 3 \(node 0: 2\)") as own:
        gather_nodes(of(0, port), FACTS, tmp_path, 20.0)
    with pytest.raises(ConfigError) as theirs:
        other.result()
    assert str(own.value) == str(theirs.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_machine_whose_checks_refuse_the_command_tells_the_other_one(
    rank: int, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "both know it")

    def wait() -> None:
        if rank == 1:
            gather_nodes(of(0, port), FACTS, tmp_path, 20.0)
        else:
            find_folder(join_node_0(of(1, port), FACTS, tmp_path, 20.0))

    waiting = beside(wait)
    own = {"nnodes": 2, "node_rank": rank, "master_addr": "127.0.0.1", "master_port": port}
    report_refusal(TrainConfig(model="tiny", output_dir=str(tmp_path), **own), ConfigError("model: not here\nMove it."))
    with pytest.raises(AitrainError, match=r"node [01] \(.*127.0.0.1\) .*: model: not here$"):
        waiting.result(20)


@pytest.mark.parametrize("token", ["wrong", None])
def test_a_machine_with_another_token_or_none_is_not_let_in_and_told_so(
    token: str | None, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathering = beside(lambda: gather_nodes(of(0, port), FACTS, tmp_path, 2.0))
    while read_token(of(0, port).place, tmp_path) is None:
        time.sleep(0.01)
    monkeypatch.setattr(nodes, "read_token", lambda *_: token)
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        join_node_0(of(1, port), FACTS, tmp_path, 20.0)
    with pytest.raises(ConfigError, match="node 1 did not connect") as caught:
        gathering.result()
    assert (TOKEN_VARIABLE in str(caught.value)) == (token is not None)


# -- the run folder


def test_a_run_folder_is_agreed_on_and_refused_on_both_machines_if_one_does_not_see_it(
    links: tuple[NodeLink, NodeLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = beside(lambda: find_folder(links[1]))
    show_folder(links[0], tmp_path, tmp_path / "checkpoints" / "checkpoint-4", epoch=3)
    assert finding.result() == SharedFolder(tmp_path, tmp_path / "checkpoints" / "checkpoint-4", 3)
    assert list(tmp_path.iterdir()) == []

    monkeypatch.setattr(nodes.Path, "exists", lambda self: False)
    monkeypatch.setattr(nodes, "SEES_WITHIN", 0.0)
    finding = beside(lambda: find_folder(links[1]))
    with pytest.raises(ConfigError, match=r"output_dir: node 1 \(.*\) does not see"):
        show_folder(links[0], tmp_path, None)
    with pytest.raises(ConfigError, match="output_dir: this machine does not see"):
        finding.result()


# -- the processes


def test_a_training_process_gets_neither_the_token_nor_another_launchers_ranks(
    monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    for name in (TOKEN_VARIABLE, "RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    variables = process_variables(check(TrainConfig(model="tiny", rl_env="envs.arithmetic")))
    assert not {TOKEN_VARIABLE, "RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} & variables.keys()
    assert variables["PATH"] == os.environ["PATH"]
