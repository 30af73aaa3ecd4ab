"""The real vLLM as a server that a run starts, feeds, watches and ends; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import httpx
import pytest

from aitrain.training.model import TINY_MODEL
from aitrain.vllm.addresses import key_header
from aitrain.vllm.server_arguments import common_arguments
from aitrain.vllm.server_process import ServerConfig, running
from tests.vllm.test_colocated import DEMO, check_agreement, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

SERVER = "--vllm-mode=server"


ASKS = '''
class Asks:
    """Plays its second turn itself, as AITraining's environments do."""

    def build_dataset(self, tokenizer):
        return [{"prompt": f"say {number}:"} for number in range(16)]

    def score_episode(self, model, tokenizer, completion, case_idx):
        ids = tokenizer(f"{completion}{case_idx}", return_tensors="pt").to(model.device)
        output = model.generate(**ids, max_new_tokens=4, do_sample=False)
        assert output.shape[1] > ids["input_ids"].shape[1]
        return {"score": 0.5, "asked": 1.0}
'''


@pytest.mark.slow
def test_a_run_learns_with_a_base_in_fp8_and_copies(tmp_path: Path) -> None:
    lines = run(tmp_path, SERVER, "--peft", "--lora-r=16", "--lr=5e-3", "--vllm-quantization=fp8",
                "--vllm-args=data_parallel_size=2", "--vllm-args=max_num_seqs=16", *DEMO, "--max-steps=40",
                "--eval-cases=64")  # fmt: skip

    ratios = [line["sampling/importance_sampling_ratio/mean"] for line in lines]
    assert 0.9 <= sum(ratios) / len(ratios) <= 1.1
    result = json.loads((tmp_path / "runs" / "run" / "result.json").read_text())
    assert result["score_before"] <= 0.45
    assert result["score_after"] >= 0.6


def test_two_training_processes_ask_one_server(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    lines = run(tmp_path, SERVER, "--num-processes=2", "--rl-env=asks.py", "--max-steps=2", "--rl-max-new-tokens=4",
                "--eval-cases=2", "--rl-prompts-per-step=4", "--batch-size=16", "--peft")  # fmt: skip

    check_agreement(lines)
    assert [line["env/asked"] for line in lines] == [1.0, 1.0]


@pytest.mark.slow
def test_a_server_asks_for_its_key_and_a_seed_decides_what_it_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other users of the machine reach 127.0.0.1 as well: every path but its health asks for the key."""
    arguments = common_arguments(str(TINY_MODEL), (), lora_rank=8, dtype="float32")
    plan = ServerConfig({**arguments, "max_model_len": 64}, tmp_path / "log", timeout=180.0)
    with (
        running([plan], lambda text: None) as (server,),
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        known = http.get("/openapi.json", headers=key_header(plan.key)).json()["paths"]
        calls = [(method, path) for path, methods in known.items() for method in methods]
        calls += [("get", path) for path in ("/docs", "//health", "/v1/models?x=/health")]
        answered = [path for method, path in calls if http.request(method, path).status_code != 401]

        def said(seed: int) -> str:
            body = {"model": name, "prompt": "3+4=", "max_tokens": 20, "temperature": 1.0, "seed": seed}
            answer = http.post("/v1/completions", json=body, headers=key_header(plan.key)).json()
            return str(answer["choices"][0]["text"])

        name = http.get("/v1/models", headers=key_header(plan.key)).json()["data"][0]["id"]
        first, again, other = said(5), said(5), said(6)
    assert answered == ["/health"]
    assert {"/collective_rpc", "/update_weights", "/v1/load_lora_adapter", "/v1/completions"} <= set(known)
    assert first == again != other
