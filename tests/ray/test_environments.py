"""Environments in actors of a real Ray cluster; `make ray`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ray.cluster import BIN, Machine, can_make_machines

pytest.importorskip("ray", reason="Ray is not installed (extra ray); make ray installs it")
pytestmark = pytest.mark.skipif(not can_make_machines(), reason="network namespaces cannot be created here")

SOURCE = '''
import os, socket, time

class Env:
    """Case 1 hangs, case 2 ends its process; the metrics say where a call ran."""

    def build_dataset(self, tokenizer):
        return [{"prompt": f"{n}+1="} for n in range(4)]

    def score_episode(self, completion, case_idx):
        if case_idx == 1:
            time.sleep(1000)
        if case_idx == 2:
            os._exit(7)
        return {"score": len(completion) % 2, "machine": int(socket.gethostname()[-1])}
'''


def test_calls_run_on_all_machines_with_the_deadlines_and_failures_of_local_processes(
    cluster: list[Machine], tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(SOURCE)
    command = [
        str(BIN / "aitrain"), "grpo", "--model", "tiny", "--rl-env", "task.py:Env", "--rl-prompts-per-step", "4",
        "--rl-num-generations", "4", "--batch-size", "16", "--rl-max-new-tokens", "8", "--max-steps", "1",
        "--rl-env-timeout", "2", "--rl-max-failed", "1", "--eval-cases", "0", "--rl-kl-coef", "0", "--no-rl-check",
        "--save-strategy", "no", "--rl-env-workers", "ray:4", "--project-name", "ray",
    ]  # fmt: skip
    cluster[0].run(*command, cwd=tmp_path)
    cases: dict[int, list[dict[str, Any]]] = {}
    for each in rollouts(tmp_path / "runs" / "ray"):
        cases.setdefault(each["case_idx"], []).append(each)
    assert {case: len(episodes) for case, episodes in cases.items()} == dict.fromkeys(range(4), 4)
    scored = cases[0] + cases[3]
    assert [each["score"] for each in scored] == [len(each["completion"]) % 2 for each in scored]
    assert {each["metrics"]["machine"] for each in scored} == {1, 2}
    assert {(each["error"]["kind"], "time.sleep(1000)" in each["error"]["message"]) for each in cases[1]} == {
        ("timed_out", True)
    }
    assert {each["error"]["message"] for each in cases[2]} == {"crashed: its process exited with code 7"}


def rollouts(run: Path) -> list[dict[str, Any]]:
    lines = [line for file in sorted((run / "rollouts").glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]
