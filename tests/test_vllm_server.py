"""The vLLM server as a child of ours: a stand-in for vLLM, and the real one where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import aitrain
from aitrain.errors import ConfigError, RunFailed
from aitrain.events import SERVER_VARIABLE, Event, Note
from aitrain.launch import managed_server as managed_server_module
from aitrain.launch import preflight
from aitrain.launch.managed_server import managed_server
from aitrain.launch.preflight import RunPlan
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder
from aitrain.vllm import addresses
from aitrain.vllm import server_process as vllm_server
from aitrain.vllm.addresses import LOOPBACK
from aitrain.vllm.key_guard import KeyGuard
from aitrain.vllm.server_process import MODEL_NAME, ServerConfig, VLLMServer

FAKE = """
import json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

what, arguments = sys.argv[1], sys.argv[2:]
port = next(int(a.partition("=")[2]) for a in arguments if a.startswith("--port="))
host = next(a.partition("=")[2] for a in arguments if a.startswith("--host="))
names = [a for a in arguments[arguments.index("--served-model-name") + 1:] if not a.startswith("--")]
print("(APIServer pid=7) INFO 11-20 11:39:30 [utils.py:1] arguments:", json.dumps(arguments), flush=True)
if what.startswith("dies:"):
    print(what[5:], flush=True)
    sys.exit(3)
engine = "import time; time.sleep(600)"
if what == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + engine
    subprocess.Popen([sys.executable, "-c", engine], start_new_session=True)
subprocess.Popen([sys.executable, "-c", engine])

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if what == "never" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": name} for name in names]}).encode())
    def log_message(self, *_):
        pass

time.sleep(0.3)
HTTPServer((host, port), Handler).serve_forever()
"""

PARENT = """
import signal, sys
from pathlib import Path
from aitrain.vllm.server_process import ServerConfig, VLLMServer

signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
plan = ServerConfig("model", Path("vllm-server.log"), program=(sys.executable, "fake.py", "healthy"))
with VLLMServer.start(plan, lambda text: None) as server:
    print(server._tree._supervisor.pid, flush=True)
    while not sys.stdin.readline():
        pass
    print(server.poll(), flush=True)
"""


@pytest.fixture
def plan(here: Path) -> Callable[..., ServerConfig]:
    """`plan("healthy")`: a stand-in that does what the word says, in the working directory."""
    (here / "fake.py").write_text(FAKE)

    def make(what: str, **values: object) -> ServerConfig:
        program = (sys.executable, str(here / "fake.py"), what)
        return ServerConfig("model", here / "vllm-server.log", program=program, **{"timeout": 20.0, **values})  # type: ignore[arg-type]

    return make


def silent(text: str) -> None:
    pass


def descendants(pid: int) -> set[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(process.name))
    found, waiting = set(), [pid]
    while waiting:
        found.add(waiting.pop())
        waiting += [child for known in found for child in children.get(known, []) if child not in found]
    return found


def alive(pids: set[int]) -> set[int]:
    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return {pid for pid in pids if lives(pid)}


def wait_until(is_so: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_of(server: VLLMServer) -> set[int]:
    return descendants(supervisor_of(server).pid)


def supervisor_of(server: VLLMServer) -> subprocess.Popen[bytes]:
    assert server._tree is not None
    return server._tree._supervisor


def arguments_in(log: Path) -> list[str]:
    line = next(line for line in log.read_text().splitlines() if "arguments: " in line)
    return list(json.loads(line.partition("arguments: ")[2]))


# -- the usual way


def test_it_is_healthy_when_start_returns_and_gone_after_the_block(plan: Callable[..., ServerConfig]) -> None:
    told: list[str] = []
    with VLLMServer.start(plan("healthy"), told.append) as server:
        pids = processes_of(server)
        assert len(alive(pids)) == 3
        assert server.poll() is None
        models = json.loads(urllib.request.urlopen(server.url + "/v1/models").read())

    assert models["data"][0]["id"] == MODEL_NAME
    assert told[0] == "starting vLLM, 0 s"
    assert alive(pids) == set()
    server.stop()


def test_the_arguments_say_what_the_plan_says(
    plan: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "a-secret")
    on_gpus = plan("healthy", gpus=("2", "3"), tensor_parallel=2, context=512, lora_rank=9, sequences=64, memory=0.5)
    with VLLMServer.start(on_gpus, silent):
        arguments = arguments_in(on_gpus.log)

    assert {"--model=model", "--host=127.0.0.1", "--tensor-parallel-size=2", "--max-model-len=512"} <= set(arguments)
    assert {"--enable-lora", "--max-lora-rank=16", "--max-num-seqs=64", "--gpu-memory-utilization=0.5"} <= set(
        arguments
    )
    assert not {"--enforce-eager", "--no-enable-chunked-prefill"} & set(arguments)
    assert "a-secret" not in " ".join(arguments)
    assert on_gpus.environment()["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_the_cpu_is_used_without_gpus_and_the_users_own_settings_win(
    plan: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    environment = plan("healthy").environment()

    assert {"--enforce-eager", "--no-enable-chunked-prefill"} <= set(plan("healthy").arguments(1))
    assert not any("lora" in argument or "memory" in argument for argument in plan("healthy").arguments(1))
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["VLLM_CPU_KVCACHE_SPACE"]) == ("", "7")
    with pytest.raises(ConfigError, match="512"):
        plan("healthy", lora_rank=513).arguments(1)


def test_a_proxy_of_the_environment_is_not_asked(
    plan: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with VLLMServer.start(plan("healthy"), silent) as server:
        assert server.poll() is None


# -- it does not start


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("(EngineCore pid=9) ERROR 11-20 11:00:00 [core.py:9] ValueError: No available memory for the cache blocks. "
         "Try\nRuntimeError: Engine core initialization failed. See root cause above.",
         ["vLLM did not start: ValueError: No available memory for the cache blocks. Try", "(it had 0.9)"]),
        ("ValueError: To serve at least one request with the model's max seq len (4), (9 GiB KV cache is needed",
         ["--model-max-length"]),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried 9 GiB", ["Lower --vllm-gpu-memory-utilization"]),
        ("OSError: no/such is not a local folder and is not a valid model identifier", ["Give --model a folder"]),
        ("ModuleNotFoundError: No module named 'vllm'", ["No module named 'vllm'", 'pip install "aitrain[vllm]"']),
        ("Traceback (most recent call last):\n  File x\nKeyError: 'odd'\nRuntimeError: Engine core initialization "
         "failed. See root cause above.", ["exit code 3", "KeyError: 'odd'"]),
        ("one\nsecond\nthird\nfourth", ["exit code 3", "second\nthird\nfourth"]),
    ],
)  # fmt: skip
def test_why_it_died_is_told_shortly(plan: Callable[..., ServerConfig], said: str, expected: list[str]) -> None:
    plan("healthy").log.write_text("ValueError: No available memory for the cache blocks, in an earlier run\n")
    with pytest.raises(RunFailed) as failed:
        VLLMServer.start(plan(f"dies:{said}"), silent)

    message = str(failed.value)
    assert all(part in message for part in expected), message
    assert len(message.splitlines()) <= 5
    assert message.endswith("vllm-server.log")
    assert "(APIServer" not in message


def test_one_that_is_never_healthy_is_ended(plan: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    servers = remembered(monkeypatch)
    pids: set[int] = set()

    def give_up_once_it_runs(_: str) -> None:
        pids.update(processes_of(servers[0]))
        if len(pids) == 3 and servers[0].plan.log.read_text():
            servers[0].plan = replace(servers[0].plan, timeout=0.0)

    with pytest.raises(RunFailed, match=r"not ready after 0 s\. It was at:\narguments"):
        VLLMServer.start(plan("never", timeout=120.0), give_up_once_it_runs)

    assert alive(pids) == set()


def test_what_is_raised_while_it_starts_ends_it(
    plan: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, pids = remembered(monkeypatch), set[int]()

    def interrupt(text: str) -> None:
        pids.update(processes_of(servers[0]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        VLLMServer.start(plan("never"), interrupt)

    assert alive(pids) == set()


def remembered(monkeypatch: pytest.MonkeyPatch) -> list[VLLMServer]:
    """The servers that are made from now on."""
    servers: list[VLLMServer] = []
    launch = VLLMServer._launch
    monkeypatch.setattr(VLLMServer, "_launch", lambda server: (servers.append(server), launch(server))[1])
    return servers


# -- ports


@pytest.fixture
def stranger() -> Iterator[int]:
    """The port of somebody else's healthy vLLM server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": MODEL_NAME}]}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_port_that_somebody_took_meanwhile_is_left_to_them(
    stranger: int, plan: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([stranger, vllm_server._free_port(LOOPBACK)])
    monkeypatch.setattr(vllm_server, "_free_port", lambda _: next(ports))
    with VLLMServer.start(plan("healthy"), silent) as server:
        assert server.port != stranger
        assert server.poll() is None


@pytest.mark.slow
def test_when_every_port_is_taken_that_is_said(
    stranger: int, plan: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_free_port", lambda _: stranger)
    with pytest.raises(RunFailed, match=f"listens on port {stranger}"):
        VLLMServer.start(plan("healthy"), silent)


# -- it dies, it is restarted, it will not go


def test_poll_tells_when_it_was_killed_and_restart_brings_it_back_at_its_address(
    plan: Callable[..., ServerConfig],
) -> None:
    with VLLMServer.start(plan("healthy"), silent) as server:
        first, url = processes_of(server), server.url
        os.kill(server_pid(server), signal.SIGKILL)
        wait_until(lambda: server.poll() is not None)
        assert server.poll() == -signal.SIGKILL
        assert alive(first) <= {server._tree._supervisor.pid if server._tree else 0}
        server.restart()
        assert server.poll() is None
        assert server.url == url
        assert urllib.request.urlopen(url + "/health").status == 200
    assert server.poll() == 0


def server_pid(server: VLLMServer) -> int:
    """Of the server itself, the supervisor's child."""
    above = supervisor_of(server).pid
    return int(Path(f"/proc/{above}/task/{above}/children").read_text().split()[0])


@pytest.mark.slow
def test_one_that_ignores_sigterm_is_killed_with_what_left_its_group(
    plan: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "STOP_SECONDS", 1.0)
    server = VLLMServer.start(plan("stubborn"), silent)
    pids = processes_of(server)
    assert len(pids) == 4
    began = time.monotonic()
    server.stop()

    assert 1.0 < time.monotonic() - began < 15.0
    assert alive(pids) == set()


def test_it_stops_although_a_fork_of_ours_holds_the_pipe_to_the_supervisor(plan: Callable[..., ServerConfig]) -> None:
    server = VLLMServer.start(plan("healthy"), silent)
    assert server._tree is not None
    held = os.dup(server._tree._socket.fileno())
    pids = processes_of(server)
    server.stop()
    os.close(held)

    assert alive(pids) == set()


@pytest.mark.parametrize("what", ["healthy", "stubborn"])
@pytest.mark.slow
def test_nothing_is_left_when_somebody_kills_the_supervisor(
    what: str, plan: Callable[..., ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its death asks the server to go; what does not, we end ourselves, and start it anew."""
    monkeypatch.setattr(vllm_server, "STOP_SECONDS", 1.0)
    with VLLMServer.start(plan(what), silent) as server:
        pids = processes_of(server)
        supervisor_of(server).kill()
        wait_until(lambda: server.poll() is not None)
        assert server.poll() == -signal.SIGKILL
        server.restart()
        assert alive(pids) == set()
        assert server.poll() is None


@pytest.fixture
def run_plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunPlan]:
    """`run_plan(option=...)`: of a run on the CPU with a server of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(preflight, "installed", lambda name: object())

    def make(**options: object) -> RunPlan:
        return preflight.check(TrainConfig(model="tiny", use_vllm=True, vllm_mode="server", **options), True)  # type: ignore[arg-type]

    return make


@pytest.mark.slow
def test_a_run_starts_its_server_again_so_often_and_says_how_it_is(
    plan: Callable[..., ServerConfig], run_plan: Callable[..., RunPlan], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, told, folder = remembered(monkeypatch), list[str](), RunFolder(here)
    monkeypatch.setattr(managed_server_module, "server_plans", lambda *_: [plan("healthy")])

    def announce(event: Event) -> None:
        if isinstance(event, Note):
            told.append(event.text)

    with managed_server(run_plan(vllm_max_restarts=1), folder, announce) as server:
        url = server[SERVER_VARIABLE]
        assert folder.read_server() == written_states(url, "running", 0)
        os.kill(server_pid(servers[0]), signal.SIGKILL)
        wait_until(lambda: folder.read_server() == written_states(url, "running", 1))
        assert urllib.request.urlopen(f"{url}/health").status == 200
        os.kill(server_pid(servers[0]), signal.SIGKILL)
        wait_until(lambda: folder.read_server()["why"])

    why = "vLLM's server ended (signal 9), and is not restarted again (--vllm-max-restarts)."
    assert folder.read_server() == written_states(url, "ended", 1, why)
    assert told == ["vLLM's server ended (signal 9): restart 1 of 1.", why]
    assert folder.log.read_text().splitlines() == told
    with managed_server(preflight.check(TrainConfig(model="tiny"), True), folder, announce) as server:
        assert server == {}
        assert folder.read_server() == {}  # a resumed run without one


def written_states(url: object, state: str, restarts: int, why: str = "") -> dict[str, object]:
    """The content of vllm-server.json for one server."""
    return {"why": why, "servers": {url: {"state": state, "restarts": restarts, "why": why}}}


def test_a_server_that_cannot_be_started_again_is_given_up_with_the_reason(
    plan: Callable[..., ServerConfig], run_plan: Callable[..., RunPlan], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, folder = remembered(monkeypatch), RunFolder(here)
    monkeypatch.setattr(managed_server_module, "server_plans", lambda *_: [plan("healthy")])
    with managed_server(run_plan(), folder, lambda event: None):
        servers[0].plan = plan("dies:OSError: no/such is not a local folder and is not a valid model identifier")
        os.kill(server_pid(servers[0]), signal.SIGKILL)
        wait_until(lambda: folder.read_server()["why"])
        assert folder.read_server()["why"].startswith("vLLM did not start: OSError: no/such is not a local folder")


def test_the_end_of_a_run_does_not_wait_for_a_server_that_is_starting_again(
    plan: Callable[..., ServerConfig], run_plan: Callable[..., RunPlan], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, told, folder = remembered(monkeypatch), list[str](), RunFolder(here)
    monkeypatch.setattr(managed_server_module, "server_plans", lambda *_: [plan("healthy")])

    def announce(event: Event) -> None:
        if isinstance(event, Note):
            told.append(event.text)

    with managed_server(run_plan(), folder, announce) as server:
        url = server[SERVER_VARIABLE]
        servers[0].plan = plan("never", timeout=600.0)
        os.kill(server_pid(servers[0]), signal.SIGKILL)
        wait_until(lambda: folder.read_server() == written_states(url, "starting", 1))
    assert servers[0].poll() == 0
    assert told == ["vLLM's server ended (signal 9): restart 1 of 3."]


@pytest.mark.slow
def test_several_servers_start_together_and_one_that_dies_is_restarted_while_the_others_serve(
    plan: Callable[..., ServerConfig], run_plan: Callable[..., RunPlan], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, told, folder = remembered(monkeypatch), list[str](), RunFolder(here)

    def announce(event: Event) -> None:
        if isinstance(event, Note):
            told.append(event.text)

    monkeypatch.setattr(managed_server_module, "server_plans", lambda *_: [plan("healthy"), plan("healthy")])
    with managed_server(run_plan(vllm_servers=2, vllm_max_restarts=1), folder, announce) as server:
        one, other = server[SERVER_VARIABLE].split(",")
        os.kill(server_pid(servers[0]), signal.SIGKILL)
        wait_until(lambda: folder.read_server()["servers"][one]["restarts"] == 1)  # type: ignore[index]
        wait_until(lambda: folder.read_server()["servers"][one]["state"] == "running")  # type: ignore[index]
        os.kill(server_pid(servers[0]), signal.SIGKILL)
        wait_until(lambda: folder.read_server()["servers"][one]["state"] == "ended")  # type: ignore[index]
        assert folder.read_server()["why"] == ""  # the other one serves
        assert urllib.request.urlopen(f"{other}/health").status == 200
        left = processes_of(servers[1])
    assert alive(left) == set()
    assert [text.partition(" ended")[0] for text in told] == [f"The vLLM server at {one}"] * 2


def test_when_one_of_several_servers_does_not_start_none_is_left(plan: Callable[..., ServerConfig], here: Path) -> None:
    pids, before = set[int](), descendants(os.getpid())

    def look(text: str) -> None:
        pids.update(descendants(os.getpid()) - before)

    with pytest.raises(RunFailed, match="did not start: exit code 3"):
        VLLMServer.start_all([plan("healthy"), plan("dies:of something")], look)
    assert pids
    wait_until(lambda: not alive(pids))


def test_each_server_of_a_run_has_its_share_of_the_gpus_and_its_log(
    run_plan: Callable[..., RunPlan], here: Path
) -> None:
    made = run_plan(vllm_servers=2, vllm_server_gpus=2)
    first, second = managed_server_module.server_plans(replace(made, server_gpus=("4", "5", "6", "7")), RunFolder(here))
    assert (first.gpus, second.gpus) == (("4", "5"), ("6", "7"))
    assert [first.log.name, second.log.name] == ["vllm-server-0.log", "vllm-server-1.log"]


# -- where others reach it


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_servers_have_a_key_that_is_in_no_command_line(plan: Callable[..., ServerConfig], host: str) -> None:
    one = plan("healthy", host=host, key="the-key-of-this-run")
    with VLLMServer.start(one, silent) as server:
        assert server.url.startswith(f"http://{host}:")
        words = arguments_in(one.log)
    assert {f"--host={host}", "--middleware=aitrain.vllm.key_guard.KeyGuard"} <= set(words)
    assert "the-key-of-this-run" not in " ".join(words) + repr(one)
    assert one.environment()["VLLM_API_KEY"] == "the-key-of-this-run"


def test_each_run_makes_a_key_for_its_servers_unless_there_is_one(
    run_plan: Callable[..., RunPlan], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also two runs that one process has at the same time."""
    keys: list[str] = []
    started: list[str] = []
    monkeypatch.setattr(VLLMServer, "start_all", lambda plans, _: started.extend(one.key for one in plans) or [])
    for given in ("", "of the user"):
        monkeypatch.setenv("VLLM_API_KEY", given)
        plans = [run_plan(vllm_servers=2), run_plan(vllm_listen_address="127.0.0.2")]
        with ExitStack() as stack:
            servers = [stack.enter_context(managed_server(one, RunFolder(here), lambda event: None)) for one in plans]
            keys += [server["VLLM_API_KEY"] for server in servers]
        assert os.environ["VLLM_API_KEY"] == given
    assert started == [keys[0], keys[0], keys[1], keys[2], keys[2], keys[3]]
    assert min(map(len, keys[:2])) > 40
    assert keys[0] != keys[1]
    assert keys[2:] == ["of the user"] * 2


def test_a_name_that_resolves_to_loopback_is_bound_at_all_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"debian": "127.0.1.1", "127.0.0.1": "127.0.0.1", "elsewhere": "192.0.2.1"}
    answer = {name: [(socket.AF_INET, 1, 6, "", (address, 0))] for name, address in found.items()}
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *_, **__: answer[name])
    monkeypatch.setattr(addresses, "_can_bind", lambda address: address != "192.0.2.1")
    assert [addresses.bound_address(name) for name in ("127.0.0.1", "debian", "elsewhere")] == [
        "127.0.0.1", "0.0.0.0", "0.0.0.0"
    ]  # fmt: skip
    assert [addresses.is_here(f"http://{name}:8000") for name in ("debian", "127.0.0.1", "elsewhere")] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("kind", "path", "header", "reaches"),
    [
        ("http", "/health", b"", True),
        ("http", "/v1/models", b"", False),
        ("http", "/collective_rpc", b"", False),
        ("http", "/collective_rpc", b"Bearer wrong", False),
        ("http", "/collective_rpc", b"Bearer the-key", True),
        ("websocket", "/v1/realtime", b"", False),
        ("lifespan", "", b"", True),
    ],
)
def test_no_path_but_health_is_served_without_the_key(
    kind: str, path: str, header: bytes, reaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    reached: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": [(b"authorization", header)] if header else []}
    asyncio.run(KeyGuard(app)(scope, app, send))  # type: ignore[arg-type]
    assert bool(reached) == reaches
    assert [message["type"] for message in sent] == (
        [] if reaches else ["websocket.close"] if kind == "websocket" else ["http.response.start", "http.response.body"]
    )
    assert reaches or sent[0].get("status", 401) == 401


def test_a_server_gets_the_share_of_memory_that_was_said(run_plan: Callable[..., RunPlan], here: Path) -> None:
    shares = [
        managed_server_module.server_plans(run_plan(**options), RunFolder(here))[0].memory
        for options in ({}, {"vllm_gpu_memory_utilization": 0.4})
    ]
    assert shares == [0.9, 0.4]


# -- what happens to us


@pytest.fixture
def parent(plan: Callable[..., ServerConfig], here: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own that holds a server."""
    running = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    yield running
    running.kill()
    running.communicate()


def test_everything_ends_when_we_are_killed(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    pids = descendants(int(parent.stdout.readline()))
    assert len(alive(pids)) == 3
    parent.kill()
    wait_until(lambda: not alive(pids))


def test_a_ctrl_c_in_the_terminal_leaves_the_server_to_us(parent: subprocess.Popen[str]) -> None:
    assert parent.stdout is not None
    pids = descendants(int(parent.stdout.readline()))
    os.killpg(parent.pid, signal.SIGINT)
    assert parent.stdout.readline() == "interrupted\n"
    time.sleep(0.5)
    assert len(alive(pids)) == 3
    out, _ = parent.communicate("end\n", timeout=30)

    assert out == "None\n"
    assert parent.returncode == 0
    assert alive(pids) == set()


# -- the real one

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
TINY = str(Path(aitrain.__file__).parent / "tiny_model")


@needs_vllm
def test_vllm_itself_serves_tokens_with_log_probabilities_and_leaves_no_process(here: Path) -> None:
    (here / "vllm").mkdir()
    plan = ServerConfig(TINY, here / "vllm-server.log", context=256, lora_rank=8, sequences=8, timeout=180.0)
    with VLLMServer.start(plan, silent) as server:
        pids = processes_of(server)
        asked = {"model": MODEL_NAME, "prompt": [72, 105], "max_tokens": 4, "logprobs": 0, "return_token_ids": True}
        answer = post(server, "/v1/completions", {**asked, "temperature": 1.0})
        assert post(server, "/reset_prefix_cache", {}) == {"success": True}

    assert len(pids) > 2
    assert len(answer["choices"][0]["token_ids"]) == len(answer["choices"][0]["logprobs"]["token_logprobs"])
    assert alive(pids) == set()


def post(server: VLLMServer, path: str, values: object) -> dict[str, list[dict[str, dict[str, list[float]]]]]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.plan.key}"}
    request = urllib.request.Request(server.url + path, json.dumps(values).encode(), headers)
    said = urllib.request.urlopen(request, timeout=60).read()
    return json.loads(said) if said else None


@needs_vllm
def test_vllm_itself_says_that_there_is_no_such_model(here: Path) -> None:
    with pytest.raises(RunFailed, match="Give --model a folder"):
        VLLMServer.start(ServerConfig("no/such-model", here / "vllm-server.log", timeout=120.0), silent)
