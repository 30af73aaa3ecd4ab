"""`aitrain serve` with a stand-in for vLLM: its command, how it starts, and how it ends."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from aitrain.cli.serve import serve
from aitrain.errors import ConfigError
from tests.conftest import write

FAKE = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

values = dict(a.split("=", 1) for a in sys.argv[1:] if a.startswith("--") and "=" in a)
adapters = [a.split("=")[0] for a in sys.argv[1:] if not a.startswith("--")]

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        key = os.environ.get("VLLM_API_KEY")
        is_allowed = self.path == "/health" or not key or self.headers["Authorization"] == "Bearer " + key
        self.send_response(200 if is_allowed else 401)
        self.end_headers()
        names = [values["--served-model-name"], *adapters]
        self.wfile.write(json.dumps({"data": [{"id": name} for name in names]}).encode())
    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(values["--port"])), Handler).serve_forever()
"""
LORA = {"peft_type": "LORA", "r": 24, "base_model_name_or_path": "org/base"}


@pytest.fixture
def run(here: Path) -> Callable[..., Path]:
    """`run(LORA)`: a run folder with an adapter of this configuration; None for a whole model."""

    def make(adapter: dict[str, object] | None, options: str = "model: org/base") -> Path:
        config = {"model/config.json": "{}"} if adapter is None else {"model/adapter_config.json": json.dumps(adapter)}
        files = {"config.yaml": options, "status.json": "{}", "model/model.safetensors": "", **config}
        write(here / "runs" / "mine", {**files, "model/chat_template.jinja": "{{ messages }}"})
        return here / "runs" / "mine"

    return make


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def command(model: str, capsys: pytest.CaptureFixture[str], **given: object) -> list[str]:
    """The words that `--print` prints."""
    assert serve(model, print_only=True, port=8000, dtype=None, model_max_length=None, **DEFAULTS | given) == 0  # type: ignore[arg-type]
    return shlex.split(capsys.readouterr().out)


DEFAULTS = {"vllm_gpu_memory_utilization": 0.9, "vllm_tensor_parallel_size": 1, "trust_remote_code": False}


def test_an_adapter_is_served_beside_its_base_each_by_its_name(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    model = run(LORA, "model: org/base\nmodel_max_length: 512") / "model"
    words = command("mine", capsys)
    assert {"--model=org/base", "--served-model-name=org/base", "--host=127.0.0.1"} <= set(words)
    assert {"--max-model-len=512", "--enable-lora", "--max-lora-rank=32", "--dtype=float32"} <= set(words)
    assert words[words.index("--lora-modules") + 1] == f"mine={model}"
    assert f"--chat-template={model / 'chat_template.jinja'}" in words
    assert "VLLM_CPU_KVCACHE_SPACE=1" in words


def test_a_whole_model_has_the_name_of_its_run_and_the_context_that_fits(
    run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path.cwd(), {"mine/config.json": "{}", "mine/model.safetensors": ""})
    words = command(str(run(LORA, "model: mine")), capsys)
    assert "--served-model-name=mine-base" in words  # the base has the name of the run
    shutil.rmtree("runs")
    words = command(str(run(None)), capsys)
    assert {"--served-model-name=mine", "--max-model-len=auto"} <= set(words)
    assert not [word for word in words if "lora" in word or "chat-template" in word]


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "LOHA"}, "of type LOHA"),
        ({"r": 600}, "rank 512 at most"),
    ],
)
def test_an_adapter_that_vllm_cannot_load_is_refused_with_what_works(
    run: Callable[..., Path], odd: dict[str, object], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run({**LORA, **odd})
    with pytest.raises(ConfigError, match=what):
        command("mine", capsys)


# -- the process

PARENT = """
import sys
from aitrain.cli import serve as module
from aitrain import packages
from aitrain.vllm import server_process, serving
packages.installed = lambda name: True
original = serving.ServedModel.__init__
def with_fake(self, *arguments, **values):
    original(self, *arguments, **{"program": (sys.executable, "fake.py"), **values})
serving.ServedModel.__init__ = with_fake
sys.argv[1:] = ["serve", *sys.argv[1:]]
from aitrain.cli.main import main
main()
"""


@pytest.fixture
def started(here: Path, run: Callable[..., Path]) -> Callable[..., subprocess.Popen[str]]:
    """`started(port)`: the command with the stand-in for vLLM."""
    run(LORA)
    write(here, {"fake.py": FAKE, "parent.py": PARENT})

    def start(port: int, *more: str, **variables: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "parent.py", "mine", "--port", str(port), *more],
            env={**os.environ, **variables, "TMPDIR": str(here)}, stdout=pipe, stderr=pipe, text=True,
        )  # fmt: skip

    return start


def free_port() -> int:
    with socket.socket() as attempt:
        attempt.bind(("127.0.0.1", 0))
        return int(attempt.getsockname()[1])


def test_without_a_key_of_the_users_it_makes_one_and_shows_it(started: Callable[..., subprocess.Popen[str]]) -> None:
    port = free_port()
    process = started(port, "--json", VLLM_API_KEY="")
    assert process.stdout is not None
    command, up = map(json.loads, (process.stdout.readline(), process.stdout.readline()))
    assert up["VLLM_API_KEY"] not in str(command)

    def status(**headers: str) -> int:
        return httpx.get(f"{up['url']}/models", headers=headers, trust_env=False).status_code

    assert (status(), status(Authorization=f"Bearer {up['VLLM_API_KEY']}")) == (401, 200)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        status()
