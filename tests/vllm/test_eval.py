"""`aitrain eval` of a LoRA run with the real vLLM as a server; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from aitrain.runs.eval_result import EvalResult
from aitrain.runs.run_folder import read_lines
from aitrain.training.model import TINY_MODEL
from tests.conftest import write

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def evaluate(folder: Path, *arguments: str) -> EvalResult:
    command = [sys.executable, "-m", "aitrain", "eval", "mine", "--cases=20", "--samples=4", *arguments]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return EvalResult.read(folder / done.stdout.rpartition("eval folder: ")[2].strip())


def completions(result: EvalResult, decoding: str) -> dict[int, str]:
    records = read_lines(result.folder / "rollouts" / "rank0.jsonl")
    return {one["row_number"]: one["completion"] for one in records if one["eval_phase"] == f"eval_{decoding}"}


@pytest.mark.slow
def test_a_lora_run_says_through_a_server_what_it_says_with_transformers(tmp_path: Path) -> None:
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = tmp_path / "runs/mine/model"
    get_peft_model(AutoModelForCausalLM.from_pretrained(TINY_MODEL), lora).save_pretrained(model)
    config = "model: tiny\npeft: true\nrl_env: envs.arithmetic\nrl_max_new_tokens: 8\n"
    write(tmp_path / "runs/mine", {"config.yaml": config, "status.json": "{}"})

    plain = evaluate(tmp_path)
    served = evaluate(tmp_path, "--use-vllm")

    assert completions(served, "greedy") == completions(plain, "greedy")
    assert len(set(completions(plain, "greedy").values())) > 1
    assert served.scores["greedy"] == plain.scores["greedy"]
    assert served.pass_at.keys() == {"1", "2", "3", "4"}
    assert sum(served.stops["sampled"].values()) == 80
