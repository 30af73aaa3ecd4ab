"""Several real vLLM servers of one run, one of which is killed; skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from aitrain.runs.result import Result
from aitrain.runs.run_folder import read_lines
from tests.vllm.test_colocated import check_agreement, run
from tests.vllm.test_server import API_SERVER, processes_of, those_named

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

WAITS = '''
import json, time
from pathlib import Path


class Waits:
    """Holds a batch back while a server of the run is being restarted."""

    def build_dataset(self, tokenizer):
        return [{"prompt": f"say {number}:"} for number in range(16)]

    def episode(self, case_idx):
        reply = yield
        reply += yield "more:"
        while '"starting"' in Path("runs/run/vllm-server.json").read_text():
            time.sleep(0.2)
        return reply.count("e") / (1 + len(reply))
'''


def test_two_servers_with_a_key_one_of_which_is_killed_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTE_OF_THIS_TEST", str(tmp_path))
    (tmp_path / "waits.py").write_text(WAITS)
    folder, killed, statuses = tmp_path / "runs" / "run", list[int](), list[int]()

    def kill_one() -> None:
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count('"reward"') >= 2):
            time.sleep(0.05)
        url = next(iter(json.loads((folder / "vllm-server.json").read_text())["servers"]))
        rpc: dict[str, Any] = {"method": "reload_weights"}
        statuses.append(httpx.post(f"{url}/collective_rpc", json=rpc, trust_env=False).status_code)
        statuses.extend(httpx.get(f"{url}/{path}", trust_env=False).status_code for path in ("v1/models", "health"))
        killed.extend(those_named(API_SERVER, tmp_path))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    lines = run(tmp_path, "--vllm-mode=server", "--vllm-servers=2", "--vllm-listen-address=127.0.0.2", "--peft",
                "--rl-env=waits.py", "--max-steps=12", "--eval-cases=2", "--rl-max-new-tokens=4",
                "--rl-prompts-per-step=4", "--batch-size=32", "--rl-env-timeout=500")  # fmt: skip
    killer.join()

    assert statuses == [401, 401, 200]
    assert [line["step"] for line in lines] == [*range(1, 13)]
    live = [line["vllm/servers"] for line in lines]
    assert (live[0], min(live), live[-1]) == (2, 1, 2)
    check_agreement(lines)
    assert Result.read(folder).vllm_restarts == 1
    episodes = [record for record in read_lines(folder / "rollouts" / "rank0.jsonl") if record.get("phase") != "eval"]
    assert not any(record["error"] for record in episodes)
    assert set(json.loads((folder / "status.json").read_text())["vllm_servers"].values()) == {"live"}
    assert processes_of(tmp_path) == []
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"Bearer" not in written
