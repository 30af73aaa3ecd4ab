"""Arguments of vLLM's server that a user gives: refused before anything starts, or handed over as they are meant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.batch import BatchPlan
from aitrain.errors import ConfigError
from aitrain.launch.managed_server import servers_of
from aitrain.launch.preflight import RunPlan
from aitrain.options.reading import resolve
from aitrain.runs.run_folder import RunFolder
from aitrain.vllm.server_arguments import argument_words, check_server_arguments
from aitrain.vllm.server_process import VLLMServer

OURS: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server"}
ADAPTER = {**OURS, "peft": True}


def words(**options: Any) -> list[str]:
    """The words of vLLM's command line in a run with these options."""
    plan = RunPlan(TrainConfig(**options), {}, BatchPlan(1, 1, 1), (), None)
    return servers_of(plan, RunFolder(Path("run")))[0].words()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max-model-len", "--model-max-length"), ("api_key", "aitrain sets it by itself"), ("uds", "--vllm-server-url"),
        ("logprobs_mode", "aitrain sets it by itself"), ("speculative_config", "does not start such servers"),
    ],
)  # fmt: skip
def test_an_argument_that_is_not_the_users_is_refused_with_what_to_use(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_server_arguments({"max_num_seqs": 8, name: 1})


def test_values_are_handed_over_as_vllms_parser_reads_them() -> None:
    given = {
        "max_num_seqs": 64, "enable_prefix_caching": False, "async-scheduling": True, "kv_cache_dtype": "fp8",
        "cudagraph_capture_sizes": [1, 2], "compilation_config": {"mode": 3}, "revision": None,
    }  # fmt: skip
    assert argument_words(given) == [
        "--max-num-seqs=64", "--no-enable-prefix-caching", "--async-scheduling", "--kv-cache-dtype=fp8",
        "--cudagraph-capture-sizes", "1", "2", '--compilation-config={"mode": 3}', "--revision=None",
    ]  # fmt: skip


def test_a_flag_adds_to_the_arguments_of_the_file_and_all_reach_the_server(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "use_vllm: true\nvllm_mode: server\nvllm_args: {max_num_seqs: 8, block_size: 32}\n"
    )
    config = resolve(
        TrainConfig,
        tmp_path / "c.yaml",
        {"vllm_args": ["max_num_seqs=16", "enforce_eager=true", "data_parallel_size=2"]},
    )
    told = words(**config.changed())
    assert {"--max-num-seqs=16", "--block-size=32", "--enforce-eager", "--data-parallel-size=2"} <= set(told)
    assert "--max-num-seqs=8" not in told


def test_a_server_takes_an_adapter_where_one_is_trained() -> None:
    assert {"--dtype=float32", "--enable-lora"} <= set(words(**ADAPTER))
    assert "--enable-lora" not in words(**OURS)


def test_each_server_of_a_run_has_its_share_of_the_gpus_and_its_log_and_a_setting_of_the_users_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    more = {"vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.4}
    config = TrainConfig(**OURS, vllm_servers=2, vllm_server_gpus=2, **more)
    plan = RunPlan(config, {}, BatchPlan(1, 1, 1), (), None, ("4", "5", "6", "7"))
    first, second = servers_of(plan, RunFolder(Path("run")))
    assert (first.gpus, second.gpus) == (("4", "5"), ("6", "7"))
    assert {"--tensor-parallel-size=2", "--gpu-memory-utilization=0.4"} <= set(first.words())
    assert first.environment()["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert VLLMServer({}, Path("log")).environment()["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert [first.log.name, second.log.name] == ["vllm-server-0.log", "vllm-server-1.log"]
