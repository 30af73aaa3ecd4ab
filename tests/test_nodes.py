"""Machines that meet as one run: which they are, what must be equal, which are let in and which are lost."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.batch import plan_batch
from aitrain.cli.node_run import report_refusal
from aitrain.cli.running import start
from aitrain.cli.verbosity import Verbosity
from aitrain.errors import AitrainError, RunFailed
from aitrain.launch import node_link, nodes, resource_check
from aitrain.launch.eval_plan import check_eval
from aitrain.launch.launcher import launcher_of
from aitrain.launch.local_processes import reserved_port
from aitrain.launch.model_shape import read_model_shape
from aitrain.launch.node_link import NodeLink, Peer, WrongTokenError, prove_to_node_0
from aitrain.launch.node_token import TOKEN_VARIABLE, read_token
from aitrain.launch.nodes import (
    SharedFolder,
    difference,
    facts,
    find_folder,
    gather_nodes,
    interface_variables,
    join_node_0,
    show_folder,
    silence,
)
from aitrain.launch.preflight import RunPlan, check
from aitrain.launch.processes import process_variables
from aitrain.launch.resource_check import check_resources, device_memory
from aitrain.launch.resource_estimate import estimate_memory
from aitrain.launch.slurm import Nodes, expand, find_nodes, given_machines, idle_nodes
from aitrain.launch.stop_signals import on_stop_signals
from aitrain.notebook import train_here
from aitrain.options.evaluate import EvalConfig
from aitrain.runs.model_reference import read_model
from aitrain.runs.run_folder import RunFolder

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


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for long."""
    monkeypatch.setattr(nodes, "TRY_EVERY", 0.01)
    monkeypatch.setattr(nodes, "SEES_WITHIN", 0.05)
    monkeypatch.setattr(nodes, "TOKEN_SECONDS", 0.2)


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


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


def of(rank: int, port: int, count: int = 2) -> Nodes:
    return Nodes(count, rank, "127.0.0.1", port)


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
    ("short", "names"),
    [
        ("one", ["one"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("a1,a2", ["a1", "a2"]),
        ("n[9-11].local", ["n9.local", "n10.local", "n11.local"]),
    ],
)
def test_the_short_form_of_slurms_node_names_is_expanded(short: str, names: list[str]) -> None:
    assert expand(short) == names


def test_under_srun_no_flags_are_needed() -> None:
    assert find_nodes(TrainConfig(), SLURM) == Nodes(2, 1, "gpu07", 20049)
    assert find_nodes(TrainConfig(master_port=7000), SLURM) == Nodes(2, 1, "gpu07", 7000)
    assert find_nodes(TrainConfig(), {**SLURM, "PMI_SIZE": "2", "PMI_RANK": "1"}) == find_nodes(TrainConfig(), SLURM)
    assert find_nodes(TrainConfig(nnodes=1), SLURM) is None
    later = given_machines({**SLURM, "SLURM_STEP_ID": "1"})
    assert later is not None
    assert later.port != 20049  # two steps of a job may share a machine


def test_machines_are_taken_from_the_variables_that_kubernetes_operators_set() -> None:
    environ = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"}
    assert find_nodes(TrainConfig(), environ) == Nodes(3, 2, "job-0", 23456)


def test_one_machine_is_no_machine_among_others() -> None:
    assert find_nodes(TrainConfig(), {}) is None
    assert find_nodes(TrainConfig(), {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}) is None
    assert find_nodes(TrainConfig(), {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1"}) is None


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "torchrun, accelerate launch or mpirun started this"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, "started this command 4 times"),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, "mpirun started this command 4 times"),  # MPICH
        ({"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "3"}, "mpirun started this command 4 times"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "4"}, "mpirun started this command 4 times"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 tasks on 2 nodes.*\nUse srun --ntasks-per-node=1"),
    ],
)
def test_to_be_started_several_times_on_a_machine_is_refused(environ: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_nodes(TrainConfig(), environ)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nnodes": 2, "master_addr": "a"}, "node_rank: 2 machines need it"),
        ({"nnodes": 2, "node_rank": 1}, "master_addr: 2 machines need it"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, "node_rank: 2 of 2 machines; the ranks are 0 to 1"),
        ({"node_rank": 1}, "node_rank: without --nnodes there is one machine"),
    ],
)
def test_flags_that_do_not_say_which_machines_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        find_nodes(TrainConfig(**options), {})


def test_a_batch_script_that_forgot_srun_is_told_so(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "4")
    plan = check(TrainConfig(model="tiny", rl_env="envs.arithmetic"))
    assert "SLURM gave this job 4 nodes, and this command runs on one: start it with srun." in plan.notes
    assert idle_nodes({**SLURM, "SLURM_JOB_NUM_NODES": "4"}) == 0


def test_the_batch_is_that_of_all_machines_and_only_node_0_looks_for_a_checkpoint(here: Path) -> None:
    options: dict[str, Any] = {"model": "tiny", "rl_env": "envs.arithmetic", "num_processes": 2, "nnodes": 3}
    first, second = (
        TrainConfig(**options, node_rank=rank, master_addr="a", resume_from_checkpoint="auto") for rank in (0, 1)
    )
    plan = check(second)
    assert plan.folder is None
    assert check(first).folder is not None
    assert (plan.batch.processes, plan.processes, plan.nodes) == (6, 2, Nodes(3, 1, "a", 29400))


def test_each_machine_needs_memory_for_its_own_processes_and_only_node_0_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(model="tiny")
    batch, other = plan_batch(config, 4), replace(of(1, 1), count=4)
    need = estimate_memory(read_model_shape("tiny"), config, batch, device_memory(()))  # type: ignore[arg-type]
    monkeypatch.setattr(resource_check, "free_memory", lambda: 2 * need.peak)
    monkeypatch.setattr(resource_check, "free_disk", lambda _: 0)
    assert check_resources(config, batch, (), other) == ()
    with pytest.raises(ConfigError, match="output_dir: the trained model alone needs"):
        check_resources(config, batch, (), replace(other, rank=0))


def test_a_sweep_a_measured_plan_and_a_notebook_are_refused_on_several_machines(here: Path) -> None:
    config = TrainConfig(model="tiny", rl_env="envs.arithmetic", nnodes=2, node_rank=0, master_addr="a")
    with pytest.raises(ConfigError, match="nnodes: only aitrain grpo runs on several machines"):
        launcher_of(check(config))
    with pytest.raises(ConfigError, match=r"nnodes: aitrain\.train runs on this machine"):
        train_here(config, object(), {})
    assert list(here.iterdir()) == []


def test_an_eval_that_srun_starts_on_several_machines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="An eval runs on one machine"):
        check_eval(EvalConfig(), read_model("tiny"))


def test_config_yaml_does_not_say_which_machine_wrote_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config(TrainConfig(nnodes=2, node_rank=0, master_addr="a"))
    assert "nnodes: 2" in folder.config.read_text()
    assert "node_rank" not in folder.config.read_text()


# -- what must be equal


def test_what_differs_is_named_with_both_values(tmp_path: Path) -> None:
    file = tmp_path / "env.py"
    file.write_text("one")
    own = facts(TrainConfig(lr=1e-5, node_rank=0, output_dir="here"), [file], 2)
    assert difference(own, facts(TrainConfig(lr=1e-5, node_rank=1, output_dir="there"), [file], 2)) == ""
    assert difference(own, facts(TrainConfig(lr=2e-5), [file], 2)) == "lr 2e-05 (node 0: 1e-05)"
    assert difference(own, facts(TrainConfig(), [file], 1)) == "number of training processes 1 (node 0: 2)"
    file.write_text("two")
    assert "the environment's code " in difference(own, facts(TrainConfig(), [file], 2))
    older = {**own, "versions": {**own["versions"], "trl": "0.9"}}
    assert difference(own, older) == f"trl 0.9 (node 0: {own['versions']['trl']})"
    assert difference(own, {}) != ""


def test_another_module_of_the_environments_package_is_another_environment(tmp_path: Path) -> None:
    for name in ("__init__.py", "env.py", "judge.py"):
        (tmp_path / name).write_text("")
    before = facts(TrainConfig(), [tmp_path / "env.py"], 1)
    (tmp_path / "judge.py").write_text("stricter = True")
    assert "the environment's code" in difference(before, facts(TrainConfig(), [tmp_path / "env.py"], 1))


def test_another_local_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = TrainConfig(model=str(tmp_path))
    before = facts(config, [], 1)
    (tmp_path / "config.json").write_text("[]")
    assert "the model's files" in difference(before, facts(config, [], 1))


def test_secrets_of_the_environment_are_not_sent() -> None:
    config = TrainConfig(rl_env_config={"api_key": "very-secret"})
    assert "very-secret" not in str(facts(config, [], 1))


# -- meeting


def test_machines_that_are_equal_meet_and_know_each_other(links: tuple[NodeLink, NodeLink], tmp_path: Path) -> None:
    leading, following = links
    assert [(peer.node, peer.host, peer.address, peer.gpus) for peer in leading.peers] == [
        (1, socket.gethostname(), "127.0.0.1", 3)
    ]
    assert leading.peers[0].name == f"node 1 ({socket.gethostname()}, 127.0.0.1)"
    assert following.peers[0].name == "node 0 (127.0.0.1)"
    assert list(tmp_path.iterdir()) == []  # the token's file is gone


def test_the_token_is_in_a_file_that_only_its_owner_can_read(tmp_path: Path, port: int) -> None:
    gathering = beside(lambda: gather_nodes(of(0, port), FACTS, tmp_path / "runs", 20.0))
    while not (made := list(tmp_path.glob("runs/.nodes-????????????"))):
        time.sleep(0.01)
    assert stat.S_IMODE(made[0].stat().st_mode) == 0o600
    assert len(read_token(of(0, port).place, tmp_path / "runs") or "") == 64
    join_node_0(of(1, port), FACTS, tmp_path / "runs", 20.0).close()
    gathering.result().close()


def test_sigterm_while_waiting_for_the_others_leaves_no_token(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunPlan, "open_folder", lambda self: pytest.fail("no folder is made"))
    config = TrainConfig(model="tiny", output_dir=str(tmp_path))
    plan = RunPlan(config, {}, plan_batch(config, 2), (), None, nodes=of(0, port))

    def stop() -> None:
        while read_token(of(0, port).place, tmp_path) is None:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    beside(stop)
    with on_stop_signals(lambda *_: pytest.fail("it is handled")), pytest.raises(KeyboardInterrupt):
        start(plan, Verbosity())
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_differs_ends_the_start_on_both_with_the_same_sentence(tmp_path: Path, port: int) -> None:
    other = beside(lambda: join_node_0(of(1, port), {**FACTS, "options": {"lr": 2.0}}, tmp_path, 20.0))
    with pytest.raises(ConfigError, match=r"node 1 \(.*\) differs from node 0: lr 2.0 \(node 0: 1.0\)") as own:
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


def test_another_number_of_machines_is_a_difference(tmp_path: Path, port: int) -> None:
    other = beside(lambda: join_node_0(of(1, port, count=3), FACTS, tmp_path, 20.0))
    with pytest.raises(ConfigError, match=r"differs from node 0: nnodes 3 \(node 0: 2\)"):
        gather_nodes(of(0, port), FACTS, tmp_path, 20.0)
    with pytest.raises(ConfigError, match="nnodes 3"):
        other.result()


def test_a_machine_with_another_token_is_not_let_in_and_both_are_told(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "right")
    gathering = beside(lambda: gather_nodes(of(0, port), FACTS, tmp_path, 0.5))
    time.sleep(0.05)
    monkeypatch.setenv(TOKEN_VARIABLE, "wrong")
    with pytest.raises(ConfigError, match=f"its {TOKEN_VARIABLE} is another one"):
        join_node_0(of(1, port), FACTS, tmp_path, 20.0)
    with pytest.raises(ConfigError, match=f"Start the same command there, with the {TOKEN_VARIABLE} of this machine"):
        gathering.result()


def test_without_a_shared_folder_a_token_must_be_given(tmp_path: Path, port: int) -> None:
    gathering = beside(lambda: gather_nodes(of(0, port), FACTS, tmp_path / "one", 0.5))
    with pytest.raises(ConfigError, match="has no file of its token\nSet AITRAIN_TOKEN to the same secret"):
        join_node_0(of(1, port), FACTS, tmp_path / "other", 20.0)
    with pytest.raises(ConfigError, match=r"node 1 did not connect .* within 0 seconds \(--ddp-timeout\)"):
        gathering.result()


def test_a_node_0_that_does_not_know_the_token_is_not_believed(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        other = socket.create_connection(("127.0.0.1", port))
        liar = Peer(server.accept()[0])
        liar.send({"challenge": "c"})
        liar.send({"proof": "0" * 64})
        believer = Peer(other)
        with pytest.raises(WrongTokenError):
            prove_to_node_0(believer, "token")
        liar.close()
        believer.close()


def test_strangers_do_not_keep_the_machines_from_meeting(tmp_path: Path, port: int) -> None:
    gathering = beside(lambda: gather_nodes(of(0, port), FACTS, tmp_path, 20.0))
    strangers = []
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 9000, b"[[[[\n", b'{"proof": 3}\n'):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                strangers.append(socket.create_connection(("127.0.0.1", port)))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        strangers[-1].sendall(said)
    join_node_0(of(1, port), FACTS, tmp_path, 20.0).close()
    assert len(gathering.result().peers) == 1
    for stranger in strangers:
        stranger.close()


def test_a_second_machine_of_a_rank_is_refused_and_one_that_was_restarted_is_not(tmp_path: Path, port: int) -> None:
    gathering = beside(lambda: gather_nodes(of(0, port, 3), FACTS, tmp_path, 20.0))
    first = nodes._connect(of(1, port, 3), tmp_path, 20.0)
    first.send({"rank": 1, "count": 3, "host": "one", "facts": FACTS})
    time.sleep(0.3)
    with pytest.raises(ConfigError, match="there is a node 1 already"):
        join_node_0(of(1, port, 3), FACTS, tmp_path, 20.0)
    first.close()
    again, last = (beside(lambda n=n: join_node_0(of(n, port, 3), FACTS, tmp_path, 20.0)) for n in (1, 2))
    assert [peer.node for peer in gathering.result().peers] == [1, 2]
    again.result().close()
    last.result().close()


def test_a_second_run_on_the_port_is_refused_and_leaves_the_token_of_the_first(tmp_path: Path, port: int) -> None:
    gathering = beside(lambda: gather_nodes(of(0, port), FACTS, tmp_path, 20.0))
    while read_token(of(0, port).place, tmp_path) is None:
        time.sleep(0.01)
    with pytest.raises(ConfigError, match=f"master_port: port {port} cannot be used"):
        gather_nodes(of(0, port), FACTS, tmp_path, 1.0)
    join_node_0(of(1, port), FACTS, tmp_path, 20.0).close()
    gathering.result().close()


def test_a_node_0_that_does_not_answer_is_named(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match=f"node 0 does not answer at 127.0.0.1:{port}: Connection refused"):
        join_node_0(of(1, port), FACTS, tmp_path, 0.05)


# -- the run folder


def test_the_run_folder_that_all_machines_see_is_agreed_on(links: tuple[NodeLink, NodeLink], tmp_path: Path) -> None:
    finding = beside(lambda: find_folder(links[1]))
    show_folder(links[0], tmp_path, tmp_path / "checkpoints" / "checkpoint-4", epoch=3)

    assert finding.result() == SharedFolder(tmp_path, tmp_path / "checkpoints" / "checkpoint-4", 3)
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_one_machine_does_not_see_is_refused_on_both(
    links: tuple[NodeLink, NodeLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes.Path, "exists", lambda self: False)
    monkeypatch.setattr(nodes, "SEES_WITHIN", 0.0)
    finding = beside(lambda: find_folder(links[1]))
    with pytest.raises(ConfigError, match=r"output_dir: node 1 \(.*\) does not see"):
        show_folder(links[0], tmp_path, None)
    with pytest.raises(ConfigError, match="output_dir: this machine does not see"):
        finding.result()


def test_a_machine_that_is_gone_before_the_folder_is_agreed_on_is_named(
    links: tuple[NodeLink, NodeLink], tmp_path: Path
) -> None:
    links[1].close()
    with pytest.raises(RunFailed, match=r"node 1 \(.*, 127.0.0.1\) is gone"):
        show_folder(links[0], tmp_path, None)


# -- the connection


def test_messages_and_heartbeats_arrive(links: tuple[NodeLink, NodeLink], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_link, "BEAT", 0.01)
    heard: list[Any] = []
    enough = threading.Event()

    def hear(peer: Peer, message: dict[str, Any]) -> None:
        heard.append((peer.node, message))
        if len(heard) > 2:
            enough.set()

    links[0].on_message, links[1].beat = hear, lambda: {"ranks": {1: 5}}
    for link in links:
        link.start()
    assert enough.wait(10)
    assert heard[0] == (1, {"kind": "beat", "ranks": {"1": 5}})


@pytest.mark.parametrize(("ends", "says"), [(True, "is gone"), (False, "was silent for 0 seconds")])
def test_a_machine_that_is_gone_or_silent_is_lost(
    ends: bool, says: str, links: tuple[NodeLink, NodeLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: Future[str] = Future()
    links[0].silence, links[0].on_lost = 0.2 if not ends else 30.0, lost.set_result
    links[0].start()
    if ends:
        links[1].close()
    assert says in lost.result(10)


def test_a_machine_that_said_that_it_ends_is_not_lost(links: tuple[NodeLink, NodeLink]) -> None:
    lost: list[str] = []
    links[0].on_lost = lost.append
    links[0].start()
    links[1].tell("bye")
    links[1].close()
    links[0].wait_for_byes(10, lambda: False)
    time.sleep(0.05)
    assert links[0].peers[0].has_ended
    assert lost == []


def test_a_message_that_cannot_be_handled_ends_the_run_instead_of_being_the_last_one_heard(
    links: tuple[NodeLink, NodeLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: Future[str] = Future()
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def fail(*_: object) -> None:
        raise KeyError("rank")

    links[0].on_message, links[0].on_lost = fail, lost.set_result
    links[0].start()
    links[1].tell("waits")
    assert "sent a message that cannot be handled: KeyError('rank')" in lost.result(10)


def test_silence_is_noticed_before_a_collective_operation_times_out() -> None:
    assert (silence(7200), silence(20)) == (30.0, 10.0)


def test_the_network_interface_is_that_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "10.0.0.7")
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_variables("192.0.2.1") == {}
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert interface_variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def test_a_training_process_gets_neither_the_token_nor_another_launchers_ranks(
    monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    for name in (TOKEN_VARIABLE, "RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    variables = process_variables(check(TrainConfig(model="tiny", rl_env="envs.arithmetic")))
    assert not {TOKEN_VARIABLE, "RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"} & variables.keys()
    assert variables["PATH"] == os.environ["PATH"]
