"""What aitrain leans on inside TRL and transformers: each fact by name, so that a new release says which one moved."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from datasets import Dataset
from torch.distributed.tensor import distribute_tensor
from torch.nn.modules.dropout import _DropoutNd
from transformers import LlamaForCausalLM, MambaForCausalLM, Trainer, TrainerCallback
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from trl import GRPOConfig, GRPOTrainer, chat_template_utils
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.kernels import chunked_logprob
from trl.models.utils import unwrap_model_for_generation
from trl.trainer import utils as trl_utils
from typer._click import Command, Context
from typer._click.core import Parameter
from typer._click.exceptions import NoArgsIsHelpError
from typer.core import TyperCommand, TyperGroup

from aitrain.cli.main import app
from aitrain.launch.resource_estimate import TILE
from tests.training.upstream_uses import uses

pytestmark = pytest.mark.slow

DOCUMENTED = {
    "accelerator", "add_callback", "args", "compute_loss", "compute_loss_context_manager", "create_model_card",
    "is_deepspeed_enabled", "is_fsdp_enabled", "lr_scheduler", "model", "model_wrapped", "optimizer",
    "processing_class", "remove_callback", "save_model", "state", "train", "training_step",
}  # fmt: skip
"""Public members of transformers' Trainer."""
CALLBACK_EVENTS = {
    "on_log", "on_optimizer_step", "on_save", "on_step_begin", "on_step_end", "on_train_begin", "on_train_end",
}  # fmt: skip
NOT_INSIDE = {
    "_exit", "_replace", "_trial_id", "_abc", "_contextvars", "_frozen_importlib", "_lru_list_elem", "_struct", "_max",
    "_min", "_sample", "_test", "main", "chat_template",
}  # fmt: skip
"""What Python documents, modules of Python's, endings of names, and the id of a trial in Optuna's journal, which
tests/sweep/test_sweep.py covers by resuming a killed sweep."""
OF_ADAPTERS = {"_teardown"}
"""Of verifiers; tests/adapters/real/test_verifiers_upstream.py is their contract test, where verifiers is installed."""


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
    (GRPOTrainer._move_model_to_device, "self model device"),
    (GRPOTrainer._prepare_for_training, "self max_steps train_dataloader resume_from_checkpoint"),
    (GRPOTrainer._save, "self output_dir state_dict"),
    (GRPOTrainer._save_optimizer_and_scheduler, "self output_dir"),
    (GRPOTrainer._load_optimizer_and_scheduler, "self checkpoint"),
    (GRPOTrainer.create_optimizer, "self model"),
    (GRPOTrainer.save_model, "self output_dir _internal_call"),
    (VLLMGeneration.sync_weights, "self"),
    (fsdp2_prepare_model, "accelerator model"),
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
            *(f"self.{name}" for name in ("max_completion_length", "temperature", "top_k", "top_p", "min_p",
                                          "repetition_penalty")),
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
    assert isinstance(trl_utils._ChunkedLogProbFunction, type)


def test_a_trainer_with_a_rollout_function_only_syncs_the_weights_of_its_vllm() -> None:
    """use_vllm, _last_loaded_step and vllm_generation are all that has to be set for that."""
    rollout = inspect.getsource(GRPOTrainer._generate).partition("if self.rollout_func is not None:")[2]
    rollout = rollout.partition("else:")[0]
    assert "if self.use_vllm and self.state.global_step != self._last_loaded_step:" in rollout
    assert "self.vllm_generation.sync_weights()" in rollout
    users = [name for name, member in vars(GRPOTrainer).items()
             if inspect.isfunction(member) and "self.vllm_generation" in inspect.getsource(member)]  # fmt: skip
    assert users == ["__init__", "_generate_single_turn", "_tool_call_loop", "_generate"]


# -- a plain trainer


@pytest.fixture(scope="module")
def trained(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """A trainer of TRL's after two steps without aitrain."""
    config = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trained")), use_cpu=True, bf16=False, max_steps=2, min_p=0.1,
        per_device_train_batch_size=8, num_generations=4, max_completion_length=4, report_to="none",
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"say {number}"} for number in range(8)])
    reward = lambda prompts, **_: [float(index % 4) for index in range(len(prompts))]  # noqa: E731
    trainer = GRPOTrainer(model=str(small_model), reward_funcs=reward, args=config, train_dataset=rows)
    trainer.train()
    return trainer


def test_the_trainers_members_are_there(trained: GRPOTrainer) -> None:
    assert not {name for name in DOCUMENTED if not hasattr(trained, name)}
    assert not {name for name in CALLBACK_EVENTS if not hasattr(TrainerCallback, name)}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length", "beta",
             "loss_type", "num_generations", "num_iterations", "mask_truncated_completions",
             "scale_rewards", "importance_sampling_level")  # fmt: skip
    assert {name: getattr(trained, name) for name in names} == {name: getattr(trained.args, name) for name in names}
    assert (trained.shuffle_dataset, trained.use_adaptive_entropy, trained.aux_loss_enabled) == (True, False, False)
    assert trained.ref_model is None
    assert trained.current_gradient_accumulation_steps == 1
    assert trained.eos_token_ids == [trained.processing_class.eos_token_id]
    with trained._dist.summon_full_params(trained.model_wrapped, recurse=False):
        pass
    # what is not logged yet lies where a checkpoint takes it from
    assert all(isinstance(values, list) for values in trained._metrics["train"].values())
    assert (trained._globalstep_last_logged, trained._tr_loss.shape) == (0, torch.Size([]))
    assert isinstance(trained._total_loss_scalar, float)
    assert trained._step == 2
    assert trained._get_learning_rate() == trained.lr_scheduler.get_last_lr()[0]
    assert len(trained.lr_scheduler.base_lrs) == len(trained.optimizer.param_groups)


def test_trl_generates_with_the_settings_of_the_hf_engine() -> None:
    """What `HFEngine` is given of a trainer; test_engines.py compares what both generate."""
    settings = inspect.getsource(GRPOTrainer.__init__).partition("generation_kwargs = {")[2].partition("}")[0]
    assert set(re.findall(r'"(\w+)":', settings)) == {
        "max_new_tokens", "do_sample", "pad_token_id", "bos_token_id", "eos_token_id", "temperature", "top_p", "top_k",
        "min_p", "repetition_penalty", "cache_implementation",
    }  # fmt: skip


def test_what_is_replaced_or_asked_is_there() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_state._set_sync_gradients(False)
    assert accelerator.sync_gradients is False
    accelerator.gradient_state._set_sync_gradients(True)
    assert hasattr(vllm_generation, "LLM") == (importlib.util.find_spec("vllm") is not None)
    assert isinstance(torch.ops.mkldnn._is_mkldnn_bf16_supported(), bool)
    assert issubclass(torch.nn.Dropout, _DropoutNd)
    assert (LlamaForCausalLM._is_stateful, MambaForCausalLM._is_stateful) == (False, True)
    tensor = torch.zeros(2)
    before = tensor._version
    tensor += 1
    assert tensor._version > before


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_loads_weights_like_a_checkpoint_into_a_running_engine() -> None:
    """llm_engine.step and model_runner.reload_weights, get_model; tests/vllm/test_colocated.py runs them."""
    package = Path(str(importlib.util.find_spec("vllm").origin)).parent  # type: ignore[union-attr]
    runner = (package / "v1" / "worker" / "gpu_model_runner.py").read_text(encoding="utf-8")
    assert re.search(r"def reload_weights\(\s*self,\s*weights_iterator", runner)
    assert "def get_model(self)" in runner
    assert "def step(self)" in (package / "v1" / "engine" / "llm_engine.py").read_text(encoding="utf-8")


def test_every_use_of_inside_api_is_named_in_this_file() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert uses().keys() >= {"_run_exitfuncs", "_ChunkedLogProbFunction", "_get_grad_norm", "_buffered_inputs"}
    missing = {name: places for name, places in uses().items() if not re.search(rf"\b{name}\b", text)}
    assert not missing, "write a contract test for each of them"


def test_typers_groups_look_commands_up_in_a_method_and_its_commands_write_their_options_in_one() -> None:
    assert list(inspect.signature(TyperGroup.resolve_command).parameters) == ["self", "ctx", "args"]
    assert issubclass(NoArgsIsHelpError, typer.TyperException)
    assert issubclass(typer.Context, Context)
    assert issubclass(TyperGroup, Command)
    assert list(inspect.signature(TyperCommand.format_options).parameters) == ["self", "ctx", "formatter"]
    group = typer.main.get_command(app)  # its HelpFormatter gets text by `write`
    parameters: list[Parameter] = group.get_params(Context(group))
    assert "help" in [one.name for one in parameters]


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        (
            "import atexit, os; atexit.register(print, 'once', flush=True); atexit._run_exitfuncs(); os._exit(3)",
            ("once\n", 3),
        ),
        (
            "import atexit, multiprocessing.util as util; atexit.unregister(util._exit_function); print('gone')",
            ("gone\n", 0),
        ),
    ],
)
def test_what_runs_at_exit_can_be_run_before_and_left_out(code: str, ended: tuple[str, int]) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ended


def test_python_shows_frames_cached_functions_the_shared_generator_and_a_semaphores_count() -> None:
    assert sys._getframe(0).f_code.co_name == "test_" + inspect.stack()[0].function.removeprefix("test_")
    assert threading.get_ident() in sys._current_frames()
    assert isinstance(functools.cache(len), functools._lru_cache_wrapper)
    assert random._inst.random.__self__ is random.random.__self__  # type: ignore[attr-defined]
    assert threading.Semaphore(2)._value == 2
