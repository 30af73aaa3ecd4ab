"""What aitrain leans on inside TRL and transformers: each fact by name, so that a new release says which one moved."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from transformers import Trainer
from transformers.distributed import fsdp as transformers_fsdp
from trl import GRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.kernels import chunked_logprob
from trl.trainer import utils as trl_utils

from aitrain.launch.resource_estimate import TILE

pytestmark = pytest.mark.slow


SOURCES: list[tuple[Any, list[str]]] = [
    (GRPOTrainer.__init__, ["prepare_fsdp(self.ref_model, self.accelerator)"]),
    (
        VLLMGeneration.__init__,
        ["self.mode = ", "self.tensor_parallel_size = ", "self._dist = ", "self._init_vllm()"],
    ),
    (VLLMGeneration._init_vllm, ["self.llm = LLM(", "seed", "self.vllm_client = VLLMClient(", "self.tp_group, _ ="]),
    (VLLMGeneration._iter_named_params, ["self._dist.is_fsdp"]),
    (
        VLLMGeneration.sync_weights,
        [
            "self._iter_named_params()", "self.llm.llm_engine.model_executor.driver_worker.model_runner",
            "self.llm.reset_prefix_cache()",
        ],
    ),
    (
        VLLMGeneration.generate,
        [
            "sampling_params=sampling_params", "all_gather_object(gathered_prompts, prompts, group=self.tp_group)",
            "generation_kwargs.update(self.generation_kwargs)", '"generation_kwargs": self.generation_kwargs',
            *(f"self.{name}" for name in ("max_completion_length", "temperature", "top_k", "top_p", "min_p",
                                          "repetition_penalty")),
        ],
    ),
    (Trainer._save_optimizer_and_scheduler, ["save_fsdp_model(\n", "save_fsdp_optimizer(\n"]),
    (Trainer._load_optimizer_and_scheduler, ["load_fsdp_optimizer(\n"]),
    (transformers_fsdp.is_fsdp_enabled, ["ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"]),
    (trl_utils.add_fused_lm_head, ["log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1 = per_token"]),
]  # fmt: skip
"""What a training on the CPU does not come to."""


@pytest.mark.parametrize(("thing", "facts"), SOURCES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_a_function_does_what_it_did(thing: Any, facts: list[str]) -> None:
    text = inspect.getsource(thing)
    assert [fact for fact in facts if fact not in text] == []


def test_the_loss_reads_these() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    read = set(re.findall(r'inputs(?:\.get\(|\[)"(\w+)"', source))
    pictures = {"pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
                "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"}  # fmt: skip
    assert read - pictures == {
        "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages",
        "old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio",
        "num_items_in_batch",
    }  # fmt: skip


def test_what_trl_refuses_with_vllm_is_refused_by_us_as_our_servers_are_none_of_its_own() -> None:
    """A loss type and a mode; options/algorithms.py has both."""
    lines = [line.strip() for line in inspect.getsource(GRPOTrainer.__init__).splitlines() if "self.use_vllm" in line]
    assert lines == [
        "self.use_vllm = args.use_vllm",
        'if self.loss_type == "vespo" and self.use_vllm and self.vllm_importance_sampling_correction:',
        "if self.use_vllm:",
    ]


def test_the_estimate_of_memory_has_the_tile_of_the_loss() -> None:
    assert TILE == (chunked_logprob.TOKEN_CHUNK_SIZE, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE)


def test_a_trainer_with_a_rollout_function_only_syncs_the_weights_of_its_vllm() -> None:
    """use_vllm, _last_loaded_step and vllm_generation are all that has to be set for that."""
    rollout = inspect.getsource(GRPOTrainer._generate).partition("if self.rollout_func is not None:")[2]
    rollout = rollout.partition("else:")[0]
    assert "if self.use_vllm and self.state.global_step != self._last_loaded_step:" in rollout
    assert "self.vllm_generation.sync_weights()" in rollout
    users = [name for name, member in vars(GRPOTrainer).items()
             if inspect.isfunction(member) and "self.vllm_generation" in inspect.getsource(member)]  # fmt: skip
    assert users == ["__init__", "_generate_single_turn", "_tool_call_loop", "_generate"]
