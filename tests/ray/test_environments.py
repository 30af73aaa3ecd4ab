"""Environments in actors of a real Ray cluster; `make ray`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import episodes_of
from tests.machines.namespaces import Network, cannot_make_machines, end_of
from tests.ray.cluster import SECONDS, variables

pytest.importorskip("ray", reason="Ray is not installed (extra ray); make ray installs it")
pytestmark = pytest.mark.skipif(bool(cannot_make_machines()), reason="network namespaces cannot be created here")

SOURCE = '''
import os, socket, time
from pathlib import Path

class Env:
    """Case 1 hangs, case 2 ends its process; the metrics say where a call ran, and both machines are waited for."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def build_dataset(self, tokenizer):
        return [{"prompt": f"{n}+1="} for n in range(4)]

    def score_episode(self, completion, case_idx):
        if case_idx == 1:
            time.sleep(1000)
        if case_idx == 2:
            os._exit(7)
        machine, gives_up = socket.gethostname()[-1], time.monotonic() + 4
        (self.folder / f"seen-{machine}").touch()
        while len(list(self.folder.glob("seen-*"))) < 2 and time.monotonic() < gives_up:
            time.sleep(0.02)
        return {"score": len(completion) % 2, "machine": int(machine)}
'''


def test_calls_run_on_all_machines_with_the_deadlines_and_failures_of_local_processes(
    cluster: Network, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(SOURCE)
    command = [
        "grpo", "--model", "tiny", "--rl-env", f"{tmp_path / 'task.py'}:Env", "--rl-prompts-per-step", "4",
        "--rl-num-generations", "4", "--batch-size", "16", "--rl-max-new-tokens", "8", "--max-steps", "1",
        "--rl-env-timeout", "5", "--rl-max-failed", "1", "--eval-cases", "0", "--rl-kl-coef", "0", "--no-rl-check",
        "--save-strategy", "no", "--rl-env-workers", "ray:4", "--output-dir", str(tmp_path), "--project-name", "ray",
        "--rl-env-config", json.dumps({"folder": str(tmp_path)}),
    ]  # fmt: skip
    machine = cluster.machines[0]
    code, printed = end_of(machine.aitrain(*command, **variables(machine.folder)), SECONDS)
    assert code == 0, printed
    cases: dict[int, list[dict[str, Any]]] = {}
    for each in episodes_of(tmp_path / "ray"):
        cases.setdefault(each["case_idx"], []).append(each)
    assert {case: len(episodes) for case, episodes in cases.items()} == dict.fromkeys(range(4), 4)
    scored = cases[0] + cases[3]
    assert [each["score"] for each in scored] == [len(each["completion"]) % 2 for each in scored]
    assert {each["metrics"]["machine"] for each in scored} == {1, 2}
    assert {(each["error"]["kind"], "time.sleep(1000)" in each["error"]["message"]) for each in cases[1]} == {
        ("timed_out", True)
    }
    assert {each["error"]["message"] for each in cases[2]} == {"crashed: its process exited with code 7"}
