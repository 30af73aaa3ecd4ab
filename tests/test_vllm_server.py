"""The vLLM server as a child of ours, with a stand-in for vLLM; the real one is in vllm/test_server.py."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from aitrain.errors import RunFailed
from aitrain.events import SERVER_VARIABLE, Note
from aitrain.launch import managed_server as managed_server_module
from aitrain.launch import preflight
from aitrain.launch.managed_server import managed_server
from aitrain.launch.preflight import RunPlan
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.vllm.extensions import KeyGuard
from aitrain.vllm.server_process import VLLMServer, running, why_it_ended
from tests.execution.waiting import eventually

Plan, MakeRun = Callable[..., VLLMServer], Callable[..., RunPlan]

FAKE = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

what, arguments = sys.argv[1], sys.argv[2:]
port = next(int(a.partition("=")[2]) for a in arguments if a.startswith("--port="))
host = next(a.partition("=")[2] for a in arguments if a.startswith("--host="))
names = [a for a in arguments[arguments.index("--served-model-name") + 1:] if not a.startswith("--")]
print("(APIServer pid=7) INFO 11-20 11:39:30 [utils.py:1] arguments:", json.dumps(arguments), flush=True)
if what.startswith("dies:"):
    print(what[5:], flush=True)
    sys.exit(3)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if what == "never" else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": name} for name in names]}).encode())
    def log_message(self, *_):
        pass

HTTPServer((host, port), Handler).serve_forever()
"""


@pytest.fixture
def plan(here: Path) -> Plan:
    """`plan("healthy")`: a stand-in that does what the word says, in the working directory."""
    (here / "fake.py").write_text(FAKE)

    def make(what: str, **values: object) -> VLLMServer:
        program = (sys.executable, str(here / "fake.py"), what)
        return VLLMServer({"model": "model"}, here / "vllm-server.log", program=program, **{"timeout": 120.0, **values})  # type: ignore[arg-type]

    return make


# -- it does not start


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("(EngineCore pid=9) ERROR 11-20 11:00:00 [core.py:9] ValueError: No available memory for the cache blocks. "
         "Try\nRuntimeError: Engine core initialization failed. See root cause above.", "No available memory"),
        ("api_server.py: error: unrecognized arguments: --max-num-seq=8", "unrecognized arguments: --max-num-seq=8"),
    ],
)  # fmt: skip
def test_why_it_died_is_told_shortly(here: Path, said: str, told: str) -> None:
    log = here / "vllm-server.log"
    log.write_text(before := "ValueError: of an earlier run\n")
    with log.open("a") as file:
        file.write(said)
    failure = str(why_it_ended(log, len(before), 3))

    assert told in failure
    assert "earlier" not in failure
    assert len(failure.splitlines()) <= 5


def test_when_one_of_several_servers_does_not_start_none_is_left(plan: Plan) -> None:
    servers = [plan("healthy"), plan("dies:of something")]
    with pytest.raises(RunFailed, match="did not start: exit code 3"), running(servers):
        raise AssertionError
    assert [server.poll() for server in servers] == [0, 0]


# -- it dies, it is restarted, it will not go


def kill(server: VLLMServer) -> None:
    """The server itself, the supervisor's child."""
    psutil.Process(server._tree._supervisor.pid).children()[0].kill()


@pytest.fixture
def run_plan(monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """`run_plan(option=...)`: of a run on the CPU with a server of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(preflight, "installed", lambda name: object())

    def make(**options: object) -> RunPlan:
        return preflight.check(TrainConfig(model="tiny", use_vllm=True, vllm_mode="server", **options), True)  # type: ignore[arg-type]

    return make


def test_a_run_starts_a_server_again_so_often_while_the_others_serve_and_says_why_not_again(
    plan: Plan, run_plan: MakeRun, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # is not asked
    monkeypatch.setattr(managed_server_module, "RESTARTS", 1)
    servers, told, folder = [plan("healthy"), plan("healthy")], list[object](), RunFolder(here)
    monkeypatch.setattr(managed_server_module, "servers_of", lambda *_: servers)

    def texts() -> list[str]:
        return [event.text for event in told if isinstance(event, Note)]

    restarted, restart = list[VLLMServer](), VLLMServer.restart
    monkeypatch.setattr(VLLMServer, "restart", lambda server: (restart(server), restarted.append(server)))

    with managed_server(run_plan(vllm_servers=2), folder, told.append) as variables:
        one, other = variables[SERVER_VARIABLE].split(",")
        kill(servers[0])
        assert eventually(lambda: restarted == servers[:1])
        assert httpx.get(f"{one}/health", trust_env=False).status_code == 200
        assert httpx.get(f"{other}/health", trust_env=False).status_code == 200
        assert not folder.server.exists()
        kill(servers[0])
        assert eventually(folder.server.exists)
        assert "(signal 9), and is not restarted again" in str(read_object(folder.server)["why"])
        servers[1].program = plan("dies:OSError: no/such is not a local folder and is not a valid identifier").program
        kill(servers[1])
        assert eventually(lambda: "OSError: no/such" in str(read_object(folder.server)["why"]))
    assert [text.partition(" ended")[0] for text in texts()[:2]] == [f"The vLLM server at {one}"] * 2


# -- where others reach it


def test_each_run_makes_a_key_for_its_servers_unless_there_is_one(
    run_plan: MakeRun, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[VLLMServer] = []

    @contextmanager
    def none(servers: Sequence[VLLMServer]) -> Iterator[None]:
        started.extend(servers)
        yield

    monkeypatch.setattr(managed_server_module, "running", none)
    monkeypatch.setenv("VLLM_API_KEY", "")
    for given in ("", "", "of the user"):
        monkeypatch.setenv("VLLM_API_KEY", given)
        with managed_server(run_plan(), RunFolder(here), lambda _: None) as variables:
            assert variables["VLLM_API_KEY"] == started[-1].key
    first, second, third = (server.key for server in started)
    assert len(first) > 40
    assert first != second
    assert third == "of the user"


def test_servers_have_a_key_that_is_in_no_command_line() -> None:
    one = VLLMServer({}, Path("log"), key="the-key-of-this-run")
    words = one.words()
    assert "--host=127.0.0.1" in words
    assert "the-key-of-this-run" not in " ".join(words) + repr(one)
    assert one.environment()["VLLM_API_KEY"] == "the-key-of-this-run"


@pytest.mark.parametrize(
    ("kind", "path", "header", "answer"),
    [
        ("http", "/health", b"", "reached"),
        ("http", "/v1/models", b"Bearer wrong", "http.response.start 401"),
        ("http", "/collective_rpc", b"Bearer the-key", "reached"),
        ("websocket", "/v1/realtime", b"", "websocket.close"),
    ],
)
def test_no_path_but_health_is_served_without_the_key(
    kind: str, path: str, header: bytes, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    said: list[str] = []

    async def app(*_: Any) -> None:
        said.append("reached")

    async def send(message: Any) -> None:
        said.append(f"{message['type']} {message['status']}" if "status" in message else message["type"])

    scope = {"type": kind, "path": path, "headers": [(b"authorization", header)] if header else []}
    asyncio.run(KeyGuard(app)(scope, app, send))  # type: ignore[arg-type]
    assert said[0] == answer
    assert ("reached" in said) == (answer == "reached")
