"""The real vLLM inside the training process (.ci/vllm installs its CPU build)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from aitrain.packages import TINY_FOLDER
from aitrain.rollout.end_of_turn import EndOfTurn
from tests.conftest import episodes_of, read_lines

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

SHORT = ["--model=tiny", "--rl-kl-coef=0", "--lr=4e-4", "--rl-num-generations=8", "--save-strategy=no",
         "--eval-strategy=no", "--rl-loss-type=dapo", "--disable-gradient-checkpointing"]  # fmt: skip


def aitrain(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The real command."""
    command = [sys.executable, "-m", "aitrain", *words]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def run(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """A training with --use-vllm; the lines of metrics.jsonl that are steps."""
    done = aitrain(folder, "grpo", "--use-vllm", "--project-name=run", *SHORT, *arguments)
    log = folder / "runs" / "run" / "train.log"
    assert done.returncode == 0, done.stderr + (log.read_text()[-3000:] if log.exists() else "")
    return [line for line in read_lines(folder / "runs" / "run" / "metrics.jsonl") if "reward" in line]


def check_agreement(lines: list[dict[str, Any]]) -> None:
    """vLLM's log-probabilities are the trainer's, so the weights did arrive."""
    assert max(line["sampling/sampling_logp_difference/mean"] for line in lines) < 1e-3
    assert max(line["sampling/sampling_logp_difference/max"] for line in lines) < 2e-2


DEMO = ["--rl-env=envs.arithmetic", "--rl-prompts-per-step=16", "--batch-size=128", "--rl-max-new-tokens=8"]


@pytest.mark.parametrize(
    "where",
    [
        pytest.param([], id="colocate"),
        pytest.param(["--peft"], id="colocate-lora", marks=pytest.mark.slow),
        pytest.param(["--vllm-mode=server"], id="disk", marks=pytest.mark.slow),
    ],
)
def test_episodes_of_several_turns_are_played_with_the_weights_of_each_step(tmp_path: Path, where: list[str]) -> None:
    """With 21 steps the weights have arrived twenty times."""
    lines = run(tmp_path, "--rl-env=envs.guess_number", "--max-steps=21", "--rl-max-new-tokens=4", "--eval-cases=1",
                "--rl-prompts-per-step=2", "--batch-size=16", *where)  # fmt: skip

    check_agreement(lines)
    assert len(lines) == 21
    assert max(line["turns"] for line in lines) > 1


SHAPED = ["--rl-top-k=40", "--rl-top-p=0.9", *(f"--rl-stop={text}" for text in "137e")]


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["--vllm-mode=server"]], ids=["colocate", "server"])
def test_every_sampling_option_means_the_same_as_with_transformers(tmp_path: Path, where: list[str]) -> None:
    """The trainer computes the same log-probabilities; answers end where ours would end; two turns each."""
    lines = run(tmp_path, "--rl-env=envs.guess_number", "--max-steps=3", "--rl-max-new-tokens=32", "--eval-cases=0",
                "--rl-prompts-per-step=2", "--batch-size=16", *SHAPED, *where)  # fmt: skip

    check_agreement(lines)
    assert all(abs(line["sampling/importance_sampling_ratio/mean"] - 1) < 0.02 for line in lines)
    tokenizer = AutoTokenizer.from_pretrained(TINY_FOLDER)
    stops, ends = EndOfTurn([], ["1", "3", "7", "e"], tokenizer), 0
    for record in episodes_of(tmp_path / "runs" / "run"):
        for message in record["messages"]:
            if message["role"] == "assistant":
                ids = tokenizer(message["content"], add_special_tokens=False)["input_ids"]
                assert not any(stops.is_reached(ids[:count]) for count in range(1, len(ids))), message
                ends += stops.is_reached(ids)
    assert ends > 10
