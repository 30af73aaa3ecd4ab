"""Environments in actors of a real Ray cluster; `make ray`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ray.cluster import BIN, can_make_machines, machines

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


def test_calls_run_on_all_machines_with_the_deadlines_and_failures_of_local_processes(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(SOURCE)
    command = [
        str(BIN / "aitrain"), "grpo", "--model", "tiny", "--rl-env", "task.py:Env", "--rl-prompts-per-step", "4",
        "--rl-num-generations", "4", "--batch-size", "16", "--rl-max-new-tokens", "8", "--max-steps", "2",
        "--rl-env-timeout", "2", "--rl-max-failed", "1", "--eval-cases", "0", "--rl-kl-coef", "0", "--no-rl-check",
        "--save-strategy", "no",
    ]  # fmt: skip
    with machines(tmp_path / "home") as network:
        first, second = network.add(), network.add()
        first.start_ray()
        second.start_ray(first.address)
        local = [*command, "--project-name", "local", "--rl-env-isolation", "process", "--rl-env-workers", "4"]
        first.run(*local, cwd=tmp_path)
        first.run(*command, "--project-name", "ray", "--rl-env-workers", "ray:4", cwd=tmp_path)
    here, there = (rollouts(tmp_path / "runs" / name) for name in ("local", "ray"))
    assert [(each["case_idx"], each["completion"], each["score"]) for each in there] == [
        (each["case_idx"], each["completion"], each["score"]) for each in here
    ]
    assert {each["metrics"]["machine"] for each in there if each["score"] is not None} == {1, 2}
    for case, words in ((1, "timed out"), (2, "exited with code 7")):
        assert all(words in each["error"]["message"] for each in there if each["case_idx"] == case)


def rollouts(run: Path) -> list[dict[str, Any]]:
    lines = [line for file in sorted((run / "rollouts").glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]
