"""What aitrain leans on inside TRL and transformers: each fact by name, so that a new release says which one moved."""

from __future__ import annotations

import ast
import atexit
import copyreg
import functools
import importlib
import inspect
import multiprocessing.util
import random
import re
import sys
import threading
from collections import defaultdict, namedtuple
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import typer._click.exceptions
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.tensor import distribute_tensor
from transformers import LlamaForCausalLM, Trainer, TrainerCallback
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import GRPOTrainer, chat_template_utils
from trl.generation.vllm_generation import VLLMGeneration
from trl.kernels import chunked_logprob
from trl.models.utils import unwrap_model_for_generation
from trl.trainer import utils as trl_utils
from typer.core import TyperCommand, TyperGroup

from aitrain.launch.resource_estimate import TILE

pytestmark = pytest.mark.slow

DOCUMENTED = {
    "accelerator", "add_callback", "args", "compute_loss", "compute_loss_context_manager", "control",
    "is_deepspeed_enabled", "is_fsdp_enabled", "lr_scheduler", "model", "model_wrapped", "optimizer",
    "processing_class", "remove_callback", "save_model", "state", "train", "training_step",
}  # fmt: skip
"""Public members of transformers' Trainer."""
CALLBACK_EVENTS = {
    "on_epoch_end", "on_log", "on_optimizer_step", "on_save", "on_step_begin", "on_step_end", "on_train_begin",
    "on_train_end",
}  # fmt: skip
NOT_INSIDE = {
    "_exit", "_replace", "_trial_id", "_abc", "_contextvars", "_frozen_importlib", "_json", "_lru_list_elem", "_struct",
    "_max", "_min", "_sample", "_test", "main", "chat_template",
}  # fmt: skip
"""What Python documents, modules of Python's, endings of names, and the id of a trial in Optuna's journal, which
tests/sweep/test_sweep.py covers by resuming a killed sweep."""
OF_ADAPTERS = {"_teardown", "_call_individual_reward_func"}
"""Of verifiers; tests/adapters/real/test_verifiers.py trains with it where it is installed."""


PARAMETERS: list[tuple[Callable[..., Any], str]] = [
    (GRPOTrainer._generate_and_score_completions, "self inputs"),
    (GRPOTrainer.log, "self logs start_time"),
    (GRPOTrainer._save_checkpoint, "self model trial"),
    (
        GRPOTrainer._get_per_token_logps_and_entropies,
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy compute_aux_loss pixel_values"
        " image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids"
        " mm_token_type_ids image_position_ids",
    ),
    (GRPOTrainer._load_from_checkpoint, "self resume_from_checkpoint model"),
    (GRPOTrainer._compute_loss, "self model inputs"),
    (GRPOTrainer._get_grad_norm, "self model grad_norm"),
    (GRPOTrainer._prepare_for_training, "self max_steps train_dataloader resume_from_checkpoint"),
    (GRPOTrainer._save, "self output_dir state_dict"),
    (GRPOTrainer._save_optimizer_and_scheduler, "self output_dir"),
    (GRPOTrainer._load_optimizer_and_scheduler, "self checkpoint"),
    (GRPOTrainer.create_optimizer, "self model"),
    (GRPOTrainer.save_model, "self output_dir _internal_call"),
    (VLLMGeneration.sync_weights, "self"),
    (fsdp2_prepare_model, "accelerator model"),
    (TyperGroup.resolve_command, "self ctx args"),
    (TyperCommand.format_options, "self ctx formatter"),
]


@pytest.mark.parametrize(("function", "names"), PARAMETERS, ids=lambda value: getattr(value, "__qualname__", ""))
def test_a_function_takes_what_it_took(function: Callable[..., Any], names: str) -> None:
    assert list(inspect.signature(function).parameters) == names.split()


def test_functions_take_these_among_others() -> None:
    taken = {
        chat_template_utils.add_response_schema: {"processing_class"},
        chat_template_utils.supports_tool_calling: {"processing_class"},
        chat_template_utils.get_training_chat_template: {"processing_class"},
        chat_template_utils.parse_response: {"tokenizer", "ids", "prefix", "tools"},
        VLLMGeneration.generate: {"prompts", "images", "num_generations"},
        unwrap_model_for_generation: {
            "model", "accelerator", "gather_deepspeed3_params", "gradient_checkpointing_kwargs"
        },
        distribute_tensor: {"src_data_rank"},
    }  # fmt: skip
    assert [name for name, names in taken.items() if not names <= set(inspect.signature(name).parameters)] == []


SOURCES: list[tuple[Any, list[str]]] = [
    (VLLMGeneration.__init__, ["self.tensor_parallel_size = ", "self._dist = ", "self._init_vllm()"]),
    (VLLMGeneration._init_vllm, ["self.llm = LLM(", "seed", "self.tp_group, _ ="]),
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
        ],
    ),
    (GRPOTrainer._prepare_inputs, ["self._buffered_inputs[self._step % self.args.steps_per_generation]"]),
    (GradientCheckpointingLayer, ["if not self._can_checkpoint_with_cache:"]),
    (DynamicCache.__init__, ["super().__init__(layers=layers"]),
    (DynamicLayer.update, ["self.keys = torch.cat([self.keys, key_states]"]),
]  # fmt: skip
"""What no training of the tests would show: of vLLM, which is not installed here, and what is read in between."""


@pytest.mark.parametrize(("thing", "facts"), SOURCES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_a_function_does_what_it_did(thing: Any, facts: list[str]) -> None:
    text = inspect.getsource(thing)
    assert [fact for fact in facts if fact not in text] == []


def test_what_is_not_done() -> None:
    """Accelerate ignores FSDP on the CPU without a word: with MULTI_CPU, our refusal can go."""
    assert "MULTI_CPU" not in inspect.getsource(AcceleratorState.__init__)
    loaded = inspect.getsource(Trainer._load_from_checkpoint)
    assert "self.optimizer" not in loaded
    assert "self.lr_scheduler" not in loaded


def test_the_loss_reads_these_and_moves_the_entropy_coefficient_only_where_that_is_adaptive() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    read = set(re.findall(r'inputs(?:\.get\(|\[)"(\w+)"', source))
    pictures = {"pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
                "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"}  # fmt: skip
    assert read - pictures == {
        "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages",
        "old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio",
        "num_items_in_batch",
    }  # fmt: skip
    before, guard, after = source.partition('if self.use_adaptive_entropy and mode == "train":')
    assert guard
    for name in ("self.entropy_coef =", "self._last_world_entropy =", "self._entropy_window_stats ="):
        assert name in after
        assert name not in before


def test_what_trl_refuses_with_vllm_is_refused_by_us_as_our_servers_are_none_of_its_own() -> None:
    """A loss type and a mode; options/algorithms.py has both."""
    lines = [line.strip() for line in inspect.getsource(GRPOTrainer.__init__).splitlines() if "self.use_vllm" in line]
    assert lines == [
        "self.use_vllm = args.use_vllm",
        'if self.loss_type == "vespo" and self.use_vllm and self.vllm_importance_sampling_correction:',
        "if self.use_vllm:",
    ]


def test_log_probabilities_are_made_by_one_function_with_nine_arguments_and_five_results() -> None:
    source = inspect.getsource(trl_utils.add_fused_lm_head)
    (call,) = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
               and ast.unparse(node.func) == "_ChunkedLogProbFunction.apply")  # fmt: skip
    names = [ast.unparse(argument) for argument in call.args]
    assert names[1:3] == ["weight", "bias"]
    assert names[4:] == [
        "temperature", "_CHUNKED_LOGPROB_CHUNK_SIZE", "final_logit_softcapping", "logit_scale", "outputs"
    ]  # fmt: skip
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


# -- names


def test_the_members_of_the_trainer_and_of_callbacks_are_there() -> None:
    inside = (
        "temperature top_p top_k max_completion_length beta loss_type num_generations"
        " num_iterations mask_truncated_completions scale_rewards importance_sampling_level shuffle_dataset"
        " use_adaptive_entropy aux_loss_enabled ref_model current_gradient_accumulation_steps eos_token_ids _dist"
        " _metrics _globalstep_last_logged _tr_loss _step _get_learning_rate"
    )
    assert {*DOCUMENTED, *inside.split()} - members("trl", "GRPOTrainer") == set()
    assert not {name for name in CALLBACK_EVENTS if not hasattr(TrainerCallback, name)}
    assert "._is_accelerate_prepared = True" in inspect.getsource(Accelerator.prepare_model)


INSIDE: list[tuple[Any, str]] = [
    (GradientState(), "_set_sync_gradients"),
    (torch.nn.modules.dropout, "_DropoutNd"),
    (LlamaForCausalLM, "_is_stateful"),
    (torch.Tensor, "_version"),
    (torch.ops.mkldnn, "_is_mkldnn_bf16_supported"),
    (trl_utils, "_ChunkedLogProbFunction"),
    (trl_utils, "_use_triton"),
    *((typer._click, name) for name in ("Command", "Context", "HelpFormatter", "Parameter")),
    (typer._click.exceptions, "NoArgsIsHelpError"),
    (TyperGroup, "get_params"),
    (atexit, "_run_exitfuncs"),
    (multiprocessing.util, "_exit_function"),
    (sys, "_getframe"),
    (sys, "_current_frames"),
    (functools, "_lru_cache_wrapper"),
    (copyreg, "_slotnames"),
    (pandas, "_libs"),
    (random, "_inst"),
    (threading.Semaphore(), "_value"),
    (namedtuple("Named", "field"), "_asdict"),
]


@pytest.mark.parametrize(("owner", "name"), INSIDE)
def test_an_inside_name_of_a_library_or_of_python_is_there(owner: Any, name: str) -> None:
    assert hasattr(owner, name)


ROOT = Path(__file__).parents[2]
UPSTREAM = r"(?:accelerate|click|datasets|peft|transformers|trl|typer|vllm)\b[\w.]*"
HELD_AS = r"\b(?:trainer|vllm_generation|scheduler|lr_scheduler|_?generation)\.(\w+)"
"""Attributes of variables that hold an object of TRL or transformers."""
GIVEN = re.compile(r"(?:def |class |self\.|for |as |^\s*)(_\w+)", re.MULTILINE)
"""Names that aitrain gives itself."""


@cache
def uses() -> dict[str, set[str]]:
    """Each inside name that aitrain reads, sets, calls, replaces, overrides or imports, with the places.

    These are: names that begin with an underscore and that aitrain does not define; names from private modules;
    upstream members that a subclass uses or overrides; and attributes of TRL's trainer and its vLLM generation, public
    ones as well, because none of them is documented.
    """
    files = sorted((ROOT / "aitrain").rglob("*.py"))
    texts = {str(file.relative_to(ROOT)): re.sub("#.*", "", file.read_text(encoding="utf-8")) for file in files}
    own = {name for text in texts.values() for name in GIVEN.findall(text)}
    held = members("trl", "GRPOTrainer") | members("trl.generation.vllm_generation", "VLLMGeneration")
    found: dict[str, set[str]] = defaultdict(set)
    for place, text in texts.items():
        imports = {
            name: module
            for module, names in re.findall(rf"from ({UPSTREAM}) import (\([^)]*\)|.*)", text)
            for name in re.findall(r"\w+", names)
        }
        names = {name for name, module in imports.items() if re.search(r"(^|\.)_", f"{module}.{name}")}
        names |= set(re.findall(r"""[."'](_[A-Za-z]\w*)\b""", re.sub(r"(from|import) \S+", "", text))) - own
        names |= set(re.findall(HELD_AS, text)) & held
        for base in re.findall(r"class \w+\((\w+)", text):
            if base in imports:
                used = re.findall(r"""(?:self|super\(\))\.(\w+)|def (\w+)|"(\w+)":""", text)
                names |= {name for parts in used for name in parts} & members(imports[base], base)
        for name in names:
            found[name].add(place)
    return dict(found)


@cache
def members(module: str, name: str) -> set[str]:
    """Names of an upstream class and of its upstream bases: members, and attributes that their methods set."""
    kinds = [
        kind
        for kind in getattr(importlib.import_module(module), name).__mro__[:-1]
        if re.match(UPSTREAM, kind.__module__)
    ]
    set_in = (name for kind in kinds for name in re.findall(r"self\.(\w+)\b", inspect.getsource(kind)))
    return {name for name in (*set_in, *(name for kind in kinds for name in vars(kind))) if not name.startswith("__")}


def test_every_use_of_inside_api_is_named_in_this_file() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert uses().keys() >= {"_run_exitfuncs", "_ChunkedLogProbFunction", "_get_grad_norm", "_buffered_inputs"}
    missing = {name: places for name, places in uses().items() if not re.search(rf"\b{name}\b", text)}
    assert not missing, "write a contract test for each of them"
