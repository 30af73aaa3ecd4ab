"""Our words in TRL's words."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aitrain import ConfigError, TrainConfig
from aitrain.batch import plan_batch
from aitrain.training.model import choose_precision, load_model
from aitrain.training.trl_arguments import fit_vllm, grpo_arguments, grpo_config, refuse_zero_3
from tests.training.loss_bench import CPU


def test_the_learning_rate_follows_from_what_is_trained_unless_it_is_given() -> None:
    configs = TrainConfig(), TrainConfig(peft=True), TrainConfig(peft=True, lr=3e-4)
    assert [config.learning_rate for config in configs] == [1e-6, 1e-5, 3e-4]


def test_weights_that_deepspeed_shards_are_refused() -> None:
    made: Any = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3))
    with pytest.raises(ConfigError, match="--distributed-backend fsdp2"):
        refuse_zero_3(made)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_weights_are_float32_and_fp16_is_refused() -> None:
    assert choose_precision(TrainConfig(peft=True)).dtype == torch.float32
    assert choose_precision(TrainConfig()).use_cpu
    with pytest.raises(ConfigError, match="fp16 needs a CUDA GPU"):
        choose_precision(TrainConfig(mixed_precision="fp16"))


@pytest.mark.parametrize(
    ("completion", "options", "length", "mode"),
    [
        (128, {}, 500, "sequence_mask"),
        (4096, {}, 500, "token_truncate"),
        (4096, {"trl": {"vllm_importance_sampling_mode": "token_mask"}}, 500, "token_mask"),
        (128, {"trl": {"vllm_max_model_length": 900}}, 900, "sequence_mask"),
    ],
)
def test_vllm_is_told_of_the_longest_episode_unless_the_user_has_and_ratios_of_what_is_rounded_are_truncated(
    tmp_path: Path, completion: int, options: dict[str, Any], length: int, mode: str
) -> None:
    config = TrainConfig(use_vllm=True, **options)
    made = grpo_config(grpo_arguments(config, plan_batch(config, 1), CPU), config, tmp_path)

    assert fit_vllm(made, config, completion, 500) == length
    assert (made.vllm_max_model_length, made.vllm_importance_sampling_mode) == (length, mode)


def test_model_init_kwargs_reach_the_model(small_model: Path) -> None:
    config = TrainConfig(model=str(small_model), trl={"model_init_kwargs": {"use_cache": False}})
    assert load_model(config, torch.float32).config.use_cache is False
