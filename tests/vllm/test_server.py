"""The real vLLM as a server that a run starts, feeds, watches and ends; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, get_args

import httpx
import pytest

from aitrain.engines import colocated
from aitrain.runs.result import Result
from aitrain.training.model import TINY_MODEL
from aitrain.vllm.adapter_ranks import RANKS
from aitrain.vllm.addresses import key_header
from aitrain.vllm.server_process import ServerConfig, VLLMServer
from tests.vllm.test_colocated import ASKS, DEMO, check_agreement, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

SERVER = "--vllm-mode=server"


def processes_of(folder: Path) -> list[int]:
    """All processes whose command line or environment names a file in the folder."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            told = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
        except OSError:
            continue
        if place.name.isdigit() and str(folder).encode() in told and int(place.name) != os.getpid():
            found.append(int(place.name))
    return found


def those_named(name: bytes, folder: Path) -> list[int]:
    """Those of them that run this program; a supervisor's command names its server's, too."""
    told = {pid: command_of(pid) for pid in processes_of(folder)}
    return [
        pid for pid, command in told.items() if name in command and (name == SUPERVISOR or SUPERVISOR not in command)
    ]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


API_SERVER, SUPERVISOR = b"api_server", b"process_tree.py"


@pytest.mark.parametrize(
    ("sync", "more"), [("adapter", ["--peft", "--lora-r=16", "--lr=5e-3"]), ("disk", [])], ids=["adapter", "disk"]
)
def test_a_run_learns_through_its_own_server_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str, more: list[str]
) -> None:
    monkeypatch.setenv("NOTE_OF_THIS_TEST", str(tmp_path))
    lines = run(tmp_path, SERVER, f"--vllm-sync={sync}", *DEMO, "--max-steps=80", "--eval-cases=200", *more)

    check_agreement(lines)
    result = json.loads((tmp_path / "runs" / "run" / "result.json").read_text())
    assert result["score_before"] <= 0.45
    assert result["score_after"] >= 0.85
    assert processes_of(tmp_path) == []


DRAFTS = '--vllm-speculative={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}'


def test_all_weights_reach_the_copies_of_a_server_that_drafts_tokens(tmp_path: Path) -> None:
    lines = run(tmp_path, SERVER, "--vllm-data-parallel-size=2", DRAFTS, "--vllm-args=max_num_batched_tokens=4k",
                "--num-processes=2", *DEMO, "--batch-size=32", "--max-steps=6", "--eval-cases=2")  # fmt: skip

    check_agreement(lines)
    assert len(lines) == 6
    assert "EngineCore_DP1" in (tmp_path / "runs" / "run" / "vllm-server.log").read_text()


def test_a_run_learns_with_a_base_in_fp8_drafts_and_copies(tmp_path: Path) -> None:
    lines = run(tmp_path, SERVER, "--peft", "--lora-r=16", "--lr=5e-3", "--vllm-quantization=fp8", DRAFTS,
                "--vllm-data-parallel-size=2", "--vllm-args=max_num_seqs=16", *DEMO, "--max-steps=40",
                "--eval-cases=64")  # fmt: skip

    ratios = [line["sampling/importance_sampling_ratio/mean"] for line in lines]
    assert 0.9 <= sum(ratios) / len(ratios) <= 1.1
    result = json.loads((tmp_path / "runs" / "run" / "result.json").read_text())
    assert result["score_before"] <= 0.45
    assert result["score_after"] >= 0.6


@pytest.mark.parametrize("name", [API_SERVER, SUPERVISOR], ids=bytes.decode)
def test_a_server_that_is_killed_comes_back_with_the_weights(
    name: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTE_OF_THIS_TEST", str(tmp_path))
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    killed: list[int] = []

    def kill_once() -> None:
        while not (metrics.exists() and metrics.read_text().count('"reward"') >= 3):
            time.sleep(0.05)
        killed.extend(those_named(name, tmp_path))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_once, daemon=True)
    killer.start()
    lines = run(tmp_path, SERVER, *DEMO, "--max-steps=30", "--eval-cases=8", "--peft")
    killer.join()

    assert len(killed) == 1
    assert [line["step"] for line in lines] == [*range(1, 31)]
    check_agreement(lines)
    assert Result.read(metrics.parent).vllm_restarts == 1
    assert "vLLM's server ended (signal 9): restart 1 of 3." in (metrics.parent / "train.log").read_text()
    assert processes_of(tmp_path) == []


def test_two_training_processes_ask_one_server(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    lines = run(tmp_path, SERVER, "--num-processes=2", "--rl-env=asks.py", "--max-steps=2", "--rl-max-new-tokens=4",
                "--eval-cases=2", "--rl-prompts-per-step=4", "--batch-size=16", "--peft")  # fmt: skip

    check_agreement(lines)
    assert [line["env/asked"] for line in lines] == [1.0, 1.0]


def test_every_path_of_a_server_on_this_machine_but_its_health_asks_for_the_key(tmp_path: Path) -> None:
    """Other users of the machine reach 127.0.0.1 as well."""
    plan = ServerConfig(str(TINY_MODEL), tmp_path / "log", context=64, lora_rank=8, dtype="float32", timeout=180.0)
    with (
        VLLMServer.start(plan, lambda text: None) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        known = http.get("/openapi.json", headers=key_header(plan.key)).json()["paths"]
        calls = [(method, path) for path, methods in known.items() for method in methods]
        calls += [("get", path) for path in ("/docs", "/openapi.json", "//health", "/health/", "/v1/models?x=/health")]
        calls += [("options", "/collective_rpc"), ("post", "/health/../collective_rpc")]
        answered = [path for method, path in calls if http.request(method, path).status_code != 401]
    assert {"/collective_rpc", "/update_weights", "/v1/load_lora_adapter", "/v1/completions", "/invocations"} <= set(
        known
    )
    assert answered == ["/health"]


class Quiet(BaseHTTPRequestHandler):
    """Answers /health; notes the key of other requests, and never answers them."""

    keys: ClassVar[list[str | None]] = []
    over = threading.Event()

    def do_GET(self) -> None:
        if self.path != "/health":
            self.keys.append(self.headers["Authorization"])
            self.over.wait()
        self.send_response(200)
        self.end_headers()


def test_trls_own_client_of_a_server_has_a_deadline_and_sends_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = pytest.importorskip("requests")
    monkeypatch.setattr(colocated, "DEADLINE", 0.2)
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    monkeypatch.setattr("urllib3.util.retry.Retry.sleep", lambda *_: None)  # between TRL's attempts
    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(requests.ConnectionError, match="Read timed out"):
        colocated.KeyedClient(base_url=f"http://127.0.0.1:{server.server_port}")
    Quiet.over.set()
    server.shutdown()
    assert set(Quiet.keys) == {"Bearer the-key"}


def test_nothing_is_left_when_the_command_is_killed(tmp_path: Path) -> None:
    """And what was trained is saved: the training process ends as if it had been asked to."""
    command = [sys.executable, "-m", "aitrain", "grpo", "--use-vllm", SERVER, "--model=tiny", "--project-name=run",
               "--rl-env=envs.guess_number", "--max-steps=500", "--rl-max-new-tokens=4", "--eval-cases=1"]  # fmt: skip
    variables: dict[str, Any] = {**os.environ, "NOTE_OF_THIS_TEST": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    folder = tmp_path / "runs" / "run"
    while not (folder / "metrics.jsonl").exists():
        assert child.poll() is None
        time.sleep(0.2)
    assert len(processes_of(tmp_path)) >= 5
    child.kill()
    child.wait()

    give_up = time.monotonic() + 90
    while processes_of(tmp_path) and time.monotonic() < give_up:
        time.sleep(0.5)
    print("seconds until nothing was left:", 90 - (give_up - time.monotonic()))
    assert processes_of(tmp_path) == []
    assert json.loads((folder / "result.json").read_text())["status"] == "stopped"
    assert (folder / "model" / "config.json").exists()


def test_the_ranks_that_a_server_can_be_started_for_are_vllms() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == RANKS
