"""What aitrain leans on inside TRL and transformers: each fact by name, so that a new release says which one moved."""

from __future__ import annotations

import ast
import atexit
import functools
import importlib.util
import inspect
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, Trainer, TrainerCallback
from transformers import trainer as transformers_trainer
from transformers.distributed import fsdp as transformers_fsdp
from transformers.generation.streamers import BaseStreamer
from transformers.integrations import deepspeed as deepspeed_integration
from trl import GRPOConfig, GRPOTrainer, chat_template_utils
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.kernels import chunked_logprob
from trl.models.utils import unwrap_model_for_generation
from trl.trainer import grpo_trainer
from trl.trainer import utils as trl_utils
from typer import _completion_shared
from typer._click import Command, Context
from typer._click.exceptions import NoArgsIsHelpError
from typer._click.shell_completion import CompletionItem, add_completion_class
from typer._completion_classes import BashComplete, FishComplete, ZshComplete
from typer.core import TyperCommand, TyperGroup, TyperOption

from aitrain.cli.main import app
from aitrain.launch.resource_estimate import TILE
from aitrain.options.trl_fields import trl_fields
from aitrain.training.trainer import EpisodeTrainer
from tests.training.upstream_uses import uses

DOCUMENTED = {
    "accelerator", "add_callback", "args", "compute_loss", "compute_loss_context_manager", "create_model_card",
    "is_deepspeed_enabled", "is_fsdp_enabled", "lr_scheduler", "model", "model_wrapped", "optimizer",
    "processing_class", "remove_callback", "save_model", "state", "train", "training_step",
}  # fmt: skip
"""Public members of transformers' Trainer."""
CALLBACK_EVENTS = {
    "on_log", "on_optimizer_step", "on_save", "on_step_begin", "on_step_end", "on_train_begin", "on_train_end",
}  # fmt: skip
NOT_INSIDE = {"_exit", "_asdict", "_call"}
"""`os._exit` and `_asdict` of named tuples, which Python documents, and a slot of a class of ours."""
OF_ADAPTERS = {"_get_reward_weights", "_teardown", "_vf_weight"}
"""Of verifiers; tests/adapters/real/test_verifiers_upstream.py is their contract test, where verifiers is installed."""

OVERRIDDEN_OR_CALLED = {
    "_generate_and_score_completions": ["inputs"],
    "_generate": ["prompts"],
    "log": ["logs", "start_time"],
    "_save_checkpoint": ["model", "trial"],
    "_calculate_rewards": ["inputs", "prompts", "completions", "completion_ids_list"],
    "_get_train_sampler": ["dataset"],
    "_get_per_token_logps_and_entropies": [
        "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy", "compute_aux_loss",
        "pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
        "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
    ],
    "_load_from_checkpoint": ["resume_from_checkpoint", "model"],
    "_prepare_inputs": ["generation_batch"],
    "_compute_loss": ["model", "inputs"],
    "_move_model_to_device": ["model", "device"],
    "_prepare_for_training": ["max_steps", "train_dataloader", "resume_from_checkpoint"],
    "_save": ["output_dir", "state_dict"],
    "_save_optimizer_and_scheduler": ["output_dir"],
    "_load_optimizer_and_scheduler": ["checkpoint"],
    "create_optimizer": ["model"],
    "save_model": ["output_dir", "_internal_call"],
}  # fmt: skip


def test_every_use_of_inside_api_is_named_in_this_file() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    missing = {name: places for name, places in uses().items() if not re.search(rf"\b{name}\b", text)}
    assert not missing, "write a contract test for each of them"


def test_the_search_for_uses_finds_what_is_known_to_be_used() -> None:
    assert uses().keys() >= {
        "_last_lr", "_run_exitfuncs", "_ChunkedLogProbFunction", "_get_logits_processor", "_generate",
        "_buffered_inputs",
    }  # fmt: skip


def test_a_group_of_typer_has_its_commands_by_name() -> None:
    assert set(typer.main.get_group(app).commands) >= {"grpo", "demo"}


@pytest.mark.parametrize("name", ["_entropy_bonus_enabled", "reward_func_names", "aux_loss_enabled"])
def test_the_trainer_sets_what_is_read_of_it(name: str) -> None:
    assert f"self.{name} = " in inspect.getsource(GRPOTrainer.__init__)


class Spy(GRPOTrainer):  # type: ignore[misc]
    """Keeps what each batch came to."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self.seen: list[torch.Tensor] = [*getattr(self, "seen", ()), output["advantages"]]
        self.outputs: list[dict[str, Any]] = [*getattr(self, "outputs", ()), output]
        return output


@pytest.mark.parametrize("method", OVERRIDDEN_OR_CALLED)
def test_the_trainers_inner_methods_take_what_they_took(method: str) -> None:
    parameters = list(inspect.signature(getattr(GRPOTrainer, method)).parameters)
    assert parameters == ["self", *OVERRIDDEN_OR_CALLED[method]]


def test_the_fields_read_from_the_source_are_those_of_the_class() -> None:
    assert set(trl_fields()) >= set(GRPOConfig.__dataclass_fields__)


def test_a_warmup_below_one_is_a_share_of_the_steps(tmp_path: Path) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, warmup_steps=0.1)
    assert config.get_warmup_steps(50) == 5


def test_advantages_come_out_in_the_order_of_the_inputs(small_model: Path, tmp_path: Path) -> None:
    """One prompt's completions are scored 0, 1, 2, 3: the advantages of every group must rise in that order."""

    def reward(prompts: list[str], **_: Any) -> list[float]:
        return [float(index % 4) for index in range(len(prompts))]

    for advantages in train_plainly(Spy, small_model, tmp_path, reward).seen:
        for group in advantages.view(-1, 4):
            assert group.tolist() == sorted(group.tolist())
            assert group[0] < group[3]


def test_none_is_left_out_of_the_groups_mean_and_gets_no_advantage(small_model: Path, tmp_path: Path) -> None:
    trainer = train_plainly(
        Spy, small_model, tmp_path, lambda prompts, **_: [None, 0.0, 1.0, None] * (len(prompts) // 4)
    )
    first = trainer.seen[0].view(-1, 4)[0]
    assert first[0] == first[3] == 0.0
    assert first[1] == pytest.approx(-first[2])


def test_reward_functions_are_given_what_the_trainer_reads(small_model: Path, tmp_path: Path) -> None:
    given: list[set[str]] = []

    def reward(prompts: list[str], **rest: Any) -> list[float]:
        given.append(set(rest))
        return [0.0] * len(prompts)

    train_plainly(GRPOTrainer, small_model, tmp_path, reward)
    assert given[0] >= {"completions", "completion_ids", "log_metric", "case"}


def test_trl_generates_with_the_settings_of_the_hf_engine(small_model: Path, tmp_path: Path) -> None:
    """What `HFEngine` is given of a trainer; test_engines.py compares what both generate."""
    trainer = train_plainly(GRPOTrainer, small_model, tmp_path, lambda prompts, **_: [0.0] * len(prompts))
    assert trainer.eos_token_ids == [trainer.processing_class.eos_token_id]
    assert (trainer.pad_to_multiple_of, trainer.continuous_batching_config) == (None, None)
    assert set(inspect.signature(unwrap_model_for_generation).parameters) >= {
        "model", "accelerator", "gather_deepspeed3_params", "gradient_checkpointing_kwargs"
    }  # fmt: skip
    with trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False):
        pass
    settings = inspect.getsource(GRPOTrainer.__init__).partition("generation_kwargs = {")[2].partition("}")[0]
    assert set(re.findall(r'"(\w+)":', settings)) == {
        "max_new_tokens", "do_sample", "pad_token_id", "bos_token_id", "eos_token_id", "temperature", "top_p", "top_k",
        "min_p", "repetition_penalty", "cache_implementation",
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:You are using .rollout_func.")
def test_a_rollout_function_is_asked_for_one_episode_for_each_prompt_repeats_included(
    small_model: Path, tmp_path: Path
) -> None:
    """What it returns beside the tokens decides what is in the loss (env_mask) and reaches no other place."""
    asked: list[list[str]] = []

    def roll_out(prompts: list[str], trainer: Any) -> dict[str, Any]:
        asked.append(prompts)
        ids = [[65, 66, 67]] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": ids, "env_mask": [[1, 0, 1]] * len(prompts), "logprobs": None}

    trainer = train_plainly(
        Spy, small_model, tmp_path, lambda prompts, **_: [0.0] * len(prompts), rollout_func=roll_out
    )
    assert [len(set(prompts)) for prompts in asked] == [2, 2]
    assert all(prompts[0] == prompts[3] and prompts[4] == prompts[7] for prompts in asked)
    assert trainer.outputs[0]["tool_mask"].tolist() == [[1, 0, 1]] * 8
    assert trainer.outputs[0]["num_items_in_batch"] == 16


def test_the_loss_moves_the_entropy_coefficient_only_where_that_is_adaptive() -> None:
    before, guard, after = inspect.getsource(GRPOTrainer._compute_loss).partition(
        'if self.use_adaptive_entropy and mode == "train":'
    )
    moved = ("self.entropy_coef =", "self._last_world_entropy =", "self._entropy_window_stats =")
    assert guard
    assert all(name in after and name not in before for name in moved)


def test_a_loss_can_be_computed_of_a_batch_that_is_made_up() -> None:
    """warm_up.py: the keys that the loss reads, and the attribute that only the training loop sets."""
    source = inspect.getsource(GRPOTrainer._compute_loss)
    assert "self.current_gradient_accumulation_steps" in source
    read = set(re.findall(r'inputs(?:\.get\(|\[)"(\w+)"', source))
    pictures = {"pixel_values", "image_grid_thw", "num_images", "pixel_attention_mask", "spatial_shapes", "num_tiles",
                "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids"}  # fmt: skip
    assert read - pictures == {
        "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages",
        "old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio",
        "num_items_in_batch",
    }  # fmt: skip


def test_vllm_generation_keeps_its_sampling_in_attributes() -> None:
    source = Path(inspect.getfile(GRPOTrainer)).parents[1] / "generation" / "vllm_generation.py"
    text = source.read_text()
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_completion_length"):
        assert f"{name} = self.{name}" in text, name
    assert "generation_kwargs.update(self.generation_kwargs)" in text
    assert '"generation_kwargs": self.generation_kwargs' in text


def test_log_probabilities_are_made_by_one_function_with_nine_arguments_and_five_results() -> None:
    source = inspect.getsource(trl_utils.add_fused_lm_head)
    (call,) = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)
               and ast.unparse(node.func) == "_ChunkedLogProbFunction.apply")  # fmt: skip
    names = [ast.unparse(argument) for argument in call.args]
    assert names[1:3] == ["weight", "bias"]
    assert names[4:] == [
        "temperature",
        "_CHUNKED_LOGPROB_CHUNK_SIZE",
        "final_logit_softcapping",
        "logit_scale",
        "outputs",
    ]
    assert "log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1 = per_token" in source
    parameters = list(inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters)
    assert parameters[:5] == ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]


def test_generate_takes_logits_processors_before_temperature_and_fills_in_the_models_own_settings() -> None:
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    assert source.index("_merge_criteria_processor_list(") < source.index("TemperatureLogitsWarper(")
    filled = inspect.getsource(GenerationMixin._prepare_generation_config)
    assert "update(**self.generation_config.to_dict(), defaults_only=True" in filled


def test_a_batch_that_is_used_for_longer_than_a_step_lies_where_a_checkpoint_takes_it_from() -> None:
    text = inspect.getsource(GRPOTrainer._prepare_inputs)
    assert "self._step % generate_every == 0 or self._buffered_inputs is None" in text
    assert "self._buffered_inputs[self._step % self.args.steps_per_generation]" in text


def test_a_generation_batch_is_a_new_list_of_micro_batches_with_its_rows_and_numbers(
    small_model: Path, tmp_path: Path
) -> None:
    """Each micro-batch has its rows of every tensor, and all of every number: so ours travel with it."""
    lists: list[int] = []

    class Marks(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            return output | {"place": torch.arange(len(inputs)), "number": torch.tensor(7)}

        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            lists.append(id(self._buffered_inputs))
            assert (len(inputs["place"]), inputs["number"].item()) == (8, 7)
            assert inputs is self._buffered_inputs[self._step % 2]
            assert self.accelerator.sync_gradients == (self._step % 2 == 1)
            loss: torch.Tensor = super()._compute_loss(model, inputs)
            return loss

    trainer = train_plainly(
        Marks, small_model, tmp_path, lambda prompts, **_: [0.0] * len(prompts), gradient_accumulation_steps=2
    )
    places = sorted(place for piece in trainer._buffered_inputs for place in piece["place"].tolist())
    assert places == list(range(16))
    assert [lists.count(one) for one in dict.fromkeys(lists)] == [2, 2]


def test_truncated_completions_are_masked_in_one_place_and_flat_groups_counted_in_one() -> None:
    text = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert text.count("self.mask_truncated_completions") == text.count("if self.mask_truncated_completions:") == 1
    assert text.count('["frac_reward_zero_std"].append(') == 1


def test_with_one_ratio_for_a_completion_clip_ratios_are_means_over_rows() -> None:
    """`importance_sampling_level` says so; the ratio of a row without tokens is 1, as its sum is divided by 1."""
    text = inspect.getsource(GRPOTrainer._compute_loss)
    assert 'self.importance_sampling_level == "sequence"' in text
    assert "log_importance_weights = (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)" in text
    assert text.count("if x.shape[1] == 1:") == 2


def test_what_trl_refuses_with_vllm_is_refused_by_us_as_our_servers_are_none_of_its_own() -> None:
    """A loss type and a mode; loss_types.py has both."""
    lines = [line.strip() for line in inspect.getsource(GRPOTrainer.__init__).splitlines() if "self.use_vllm" in line]
    assert lines == [
        "self.use_vllm = args.use_vllm",
        'if self.loss_type == "vespo" and self.use_vllm and self.vllm_importance_sampling_correction:',
        "if self.use_vllm:",
    ]


def test_what_is_not_logged_yet_lies_where_a_checkpoint_takes_it_from(small_model: Path, tmp_path: Path) -> None:
    trainer = train_plainly(GRPOTrainer, small_model, tmp_path, lambda prompts, **_: [0.0] * len(prompts))
    assert all(isinstance(values, list) for values in trainer._metrics["train"].values())
    assert (trainer._globalstep_last_logged, trainer._tr_loss.shape) == (0, torch.Size([]))
    assert isinstance(trainer._total_loss_scalar, float)
    assert trainer._step == 2


def test_the_sampler_draws_another_order_for_each_epoch_from_a_generator_of_its_own(
    small_model: Path, tmp_path: Path
) -> None:
    trainer = train_plainly(GRPOTrainer, small_model, tmp_path, lambda prompts, **_: [0.0] * len(prompts))
    whole, resumed = trainer._get_train_sampler(), trainer._get_train_sampler()
    first, second = list(whole), list(whole)
    next(iter(resumed))
    assert first != second
    assert list(resumed) == second


def test_a_checkpoint_is_written_below_the_output_folder_and_is_all_that_is_written(
    small_model: Path, tmp_path: Path
) -> None:
    trainer = train_plainly(GRPOTrainer, small_model, tmp_path / "a", lambda prompts, **_: [0.0] * len(prompts))
    trainer.args.output_dir = str(tmp_path / "b")
    trainer._save_checkpoint(trainer.model, None)
    assert {path.name for path in (tmp_path / "b").iterdir()} - {"README.md"} == {"checkpoint-2"}


def test_the_model_card_of_trl_is_not_written() -> None:
    assert EpisodeTrainer.create_model_card is not GRPOTrainer.create_model_card


def test_the_gradients_norm_is_asked_for_once_a_step_right_before_the_optimizers(
    small_model: Path, tmp_path: Path
) -> None:
    """And what has no gradient then is left alone by the optimizer, decay and all."""
    calls: list[str] = []

    class Calls(GRPOTrainer):  # type: ignore[misc]
        def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            calls.append("loss")
            loss: torch.Tensor = super().training_step(*arguments, **keywords)
            assert loss.ndim == 0
            return loss

        def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
            calls.append("norm")
            norm = super()._get_grad_norm(model, grad_norm)
            assert any(parameter.grad is not None for parameter in model.parameters())
            assert torch.isfinite(torch.as_tensor(norm))
            model.zero_grad(set_to_none=True)
            self.weights = [parameter.detach().clone() for parameter in model.parameters()]
            self.optimizer.optimizer.register_step_post_hook(lambda *_: calls.append("step"))
            return norm

    reward = lambda prompts, **_: [float(index % 4) for index in range(len(prompts))]  # noqa: E731
    trainer = train_plainly(Calls, small_model, tmp_path, reward, max_steps=1, weight_decay=0.1)
    assert calls == ["loss", "norm", "step"]
    assert all(map(torch.equal, trainer.weights, trainer.model.parameters()))
    assert not trainer.optimizer.state


# -- the trainer's attributes


@pytest.fixture(scope="module")
def trained(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """A plain trainer after two steps."""
    folder = tmp_path_factory.mktemp("trained")
    return train_plainly(GRPOTrainer, small_model, folder, lambda prompts, **_: [0.0] * len(prompts), min_p=0.1)


def test_the_trainers_public_members_are_there(trained: GRPOTrainer) -> None:
    assert not {name for name in DOCUMENTED if not hasattr(trained, name)}
    assert not {name for name in CALLBACK_EVENTS if not hasattr(TrainerCallback, name)}


def test_the_trainer_keeps_its_sampling_and_loss_settings_in_attributes(trained: GRPOTrainer) -> None:
    sampling = {
        "temperature": trained.temperature,
        "top_p": trained.top_p,
        "top_k": trained.top_k,
        "min_p": trained.min_p,
        "repetition_penalty": trained.repetition_penalty,
    }
    assert sampling == {name: getattr(trained.args, name) for name in sampling}
    assert trained.max_completion_length == trained.args.max_completion_length == 4
    assert (trained.num_generations, trained.num_iterations) == (4, 1)
    assert (trained.beta, trained.loss_type) == (trained.args.beta, trained.args.loss_type)
    assert (trained.shuffle_dataset, trained.use_adaptive_entropy) == (True, False)
    assert trained.use_transformers_continuous_batching is False
    assert trained.mask_truncated_completions is False
    assert trained.ref_model is None
    assert trained.current_gradient_accumulation_steps == 1


def test_a_trainer_with_a_rollout_function_only_syncs_the_weights_of_its_vllm() -> None:
    """use_vllm, _last_loaded_step and vllm_generation are all that has to be set for that."""
    rollout = inspect.getsource(GRPOTrainer._generate).partition("if self.rollout_func is not None:")[2]
    rollout = rollout.partition("else:")[0]
    assert "if self.use_vllm and self.state.global_step != self._last_loaded_step:" in rollout
    assert "self.vllm_generation.sync_weights()" in rollout
    users = [name for name, member in vars(GRPOTrainer).items() if "self.vllm_generation" in source_of(member)]
    assert users == ["__init__", "_generate_single_turn", "_tool_call_loop", "_generate"]


def test_a_generation_that_is_replaced_is_made_in_one_place() -> None:
    assert grpo_trainer.VLLMGeneration is VLLMGeneration
    assert inspect.getsource(GRPOTrainer.__init__).count("VLLMGeneration(") == 1
    assert list(inspect.signature(VLLMGeneration.sync_weights).parameters) == ["self"]
    assert list(inspect.signature(VLLMGeneration.generate).parameters)[1:4] == ["prompts", "images", "num_generations"]


def test_the_learning_rate_is_read_from_what_the_scheduler_last_set(trained: GRPOTrainer) -> None:
    scheduler = trained.lr_scheduler
    before, scheduler._last_lr = scheduler.get_last_lr(), [0.25]
    assert trained._get_learning_rate() == 0.25
    scheduler._last_lr = before
    assert len(scheduler.base_lrs) == len(before) == len(trained.optimizer.param_groups)
    assert all({"lr", "initial_lr"} <= set(group) for group in trained.optimizer.param_groups)


def test_a_scheduler_sets_rates_from_its_base_rates() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    scheduler.base_lrs = [0.4]
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.2]
    assert (scheduler.last_epoch, scheduler.lr_lambdas[0](1)) == (1, 0.5)


def test_an_accelerator_says_which_forward_pass_ends_a_step_and_whether_weights_are_sharded() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.sync_gradients is True
    assert accelerator.state.deepspeed_plugin is None


def test_logits_exist_in_tiles_of_the_size_that_the_memory_estimate_takes() -> None:
    assert TILE == (chunked_logprob.TOKEN_CHUNK_SIZE, trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE)
    assert isinstance(trl_utils._ChunkedLogProbFunction, type)


def test_the_weights_of_a_checkpoint_are_loaded_without_optimizer_and_schedule() -> None:
    source = inspect.getsource(Trainer._load_from_checkpoint)
    assert "self.optimizer" not in source
    assert "self.lr_scheduler" not in source


# -- FSDP2


def test_a_prepared_trainer_prepares_model_and_optimizer_in_one_call() -> None:
    source = inspect.getsource(Trainer._prepare_for_training)
    assert "model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)" in source
    assert source.count("self._load_from_checkpoint(resume_from_checkpoint") == 1
    assert "if self.optimizer is None" in inspect.getsource(Trainer.create_optimizer)


def test_a_trainer_saves_and_loads_the_state_of_fsdp_by_functions_of_accelerate() -> None:
    saved, loaded = (
        inspect.getsource(getattr(Trainer, f"_{verb}_optimizer_and_scheduler")) for verb in ("save", "load")
    )
    assert all(f"{name}(\n" in saved for name in ("save_fsdp_model", "save_fsdp_optimizer"))
    assert "load_fsdp_optimizer(\n" in loaded
    for name in ("save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer"):
        assert callable(getattr(transformers_trainer, name))
    assert "self.save_model(output_dir, _internal_call=True)" in inspect.getsource(Trainer._save_checkpoint)


def test_trl_shards_its_reference_model_by_a_function_of_its_module() -> None:
    assert "prepare_fsdp(self.ref_model, self.accelerator)" in inspect.getsource(GRPOTrainer.__init__)
    assert callable(grpo_trainer.prepare_fsdp)
    assert list(inspect.signature(fsdp2_prepare_model).parameters) == ["accelerator", "model"]


def test_accelerate_ignores_fsdp_on_the_cpu_without_a_word() -> None:
    """Where this fails, the shim of the tests and our refusal can go."""
    source = inspect.getsource(AcceleratorState.__init__)
    assert "self.distributed_type = DistributedType.FSDP" in source
    assert "MULTI_CPU" not in source


def test_transformers_reads_weights_once_per_machine_by_this_variable() -> None:
    source = inspect.getsource(transformers_fsdp.is_fsdp_enabled)
    assert "ACCELERATE_USE_FSDP" in source
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" in source


def test_gradients_of_each_pass_are_sharded_at_once_where_this_is_asked_for() -> None:
    assert '"sync_each_batch"' in inspect.getsource(Trainer._run_epoch)


def test_a_tensor_is_sharded_without_communication_and_has_these_methods() -> None:
    assert "src_data_rank" in inspect.signature(distribute_tensor).parameters
    assert callable(DTensor.full_tensor)
    assert callable(DTensor.to_local)
    assert callable(FSDPModule.reshard)


# -- TRL's vLLM


def test_vllm_generation_starts_hands_over_and_asks_as_it_did() -> None:
    """What engines override and read: mode, llm, vllm_client, tensor_parallel_size, tp_group, _dist.is_fsdp."""
    made, started = (inspect.getsource(getattr(VLLMGeneration, name)) for name in ("__init__", "_init_vllm"))
    assert all(f"self.{name} = " in made for name in ("mode", "tensor_parallel_size", "_dist"))
    assert "self._init_vllm()" in made
    assert "self.llm = LLM(" in started
    assert '"seed"' in started or "seed=" in started
    assert "self.vllm_client = VLLMClient(" in started
    assert "self.tp_group, _ =" in started
    assert "self._dist.is_fsdp" in inspect.getsource(VLLMGeneration._iter_named_params)
    synced = inspect.getsource(VLLMGeneration.sync_weights)
    assert "self._iter_named_params()" in synced
    assert "self.llm.llm_engine.model_executor.driver_worker.model_runner" in synced
    assert "self.llm.reset_prefix_cache()" in synced
    asked = inspect.getsource(VLLMGeneration.generate)
    assert asked.count("self.llm.generate(") == 1
    assert "sampling_params=sampling_params" in asked
    assert "all_gather_object(gathered_prompts, prompts, group=self.tp_group)" in asked


def test_vllm_generation_reads_its_sampling_settings_in_each_call() -> None:
    asked = inspect.getsource(VLLMGeneration.generate)
    settings = (
        "max_completion_length", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "generation_kwargs",
    )  # fmt: skip
    assert not [name for name in settings if f"self.{name}" not in asked]


def test_vllms_class_is_looked_up_in_trls_module_where_it_is_replaced() -> None:
    assert hasattr(vllm_generation, "LLM") == (importlib.util.find_spec("vllm") is not None)


def test_trls_client_talks_through_a_session_of_requests() -> None:
    source = Path(str(inspect.getfile(vllm_generation))).with_name("vllm_client.py").read_text(encoding="utf-8")
    begins = source.partition("def __init__")[2]
    session, checked = begins.index("self.session = requests.Session()"), begins.index("self.check_server(")
    assert session < checked < begins.index("self._get(")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_loads_weights_like_a_checkpoint_into_a_running_engine() -> None:
    """llm_engine.step and model_runner.reload_weights, get_model; tests/vllm/test_colocated.py runs them."""
    package = Path(str(importlib.util.find_spec("vllm").origin)).parent  # type: ignore[union-attr]
    runner = (package / "v1" / "worker" / "gpu_model_runner.py").read_text(encoding="utf-8")
    assert re.search(r"def reload_weights\(\s*self,\s*weights_iterator", runner)
    assert "def get_model(self)" in runner
    assert "def step(self)" in (package / "v1" / "engine" / "llm_engine.py").read_text(encoding="utf-8")


# -- transformers, peft and torch


def test_a_generation_config_is_prepared_with_words_that_are_no_settings_left_over(trained: GRPOTrainer) -> None:
    config, rest = trained.model._prepare_generation_config(GenerationConfig(top_k=3), max_new_tokens=2, other=1)
    assert (config.top_k, config.max_new_tokens, rest["other"]) == (3, 2, 1)
    assert "max_new_tokens" not in rest
    assert GenerationConfig._get_default_generation_params()["do_sample"] is False
    assert "_from_model_config" in vars(GenerationConfig())


def test_generate_prepares_masks_and_lengths_in_methods_that_the_model_proxy_follows() -> None:
    mask = inspect.signature(GenerationMixin._prepare_attention_mask_for_generation).parameters
    assert list(mask) == ["self", "inputs_tensor", "generation_config", "model_kwargs"]
    length = inspect.signature(GenerationMixin._prepare_generated_length).parameters
    assert {"generation_config", "has_default_max_length", "input_ids_length"} <= set(length)


def test_dropout_layers_have_one_base_class_and_a_probability() -> None:
    assert issubclass(torch.nn.Dropout, _DropoutNd)
    assert torch.nn.Dropout(0.5).p == 0.5


def test_an_adapter_wraps_weights_under_the_names_that_merging_undoes(small_model: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(small_model)
    model = get_peft_model(base, LoraConfig(target_modules="all-linear", r=2, task_type="CAUSAL_LM"))
    assert model.prefix == "lora_"
    assert all(hasattr(model, name) for name in ("get_base_model", "peft_config"))
    layer = next(module for module in model.modules() if isinstance(module, LoraLayer))
    assert layer.active_adapters == ["default"]
    assert "default" in layer.lora_A
    assert "default" not in layer.lora_embedding_A
    assert layer.get_delta_weight("default").shape == layer.base_layer.weight.shape
    assert any(".base_layer.weight" in name for name, _ in model.get_base_model().named_parameters())


def test_chat_templates_are_completed_by_functions_that_take_what_they_took() -> None:
    taken = {
        "add_response_schema": ["processing_class"],
        "supports_tool_calling": ["processing_class"],
        "get_training_chat_template": ["processing_class"],
        "parse_response": ["tokenizer", "ids", "prefix", "tools"],
    }
    for name, names in taken.items():
        parameters = list(inspect.signature(getattr(chat_template_utils, name)).parameters)
        assert parameters[: len(names)] == names, name


def test_the_files_of_chat_templates_import_nothing_else_of_trl() -> None:
    """They are loaded from where they lie, without trl/__init__.py."""
    folder = Path(chat_template_utils.__file__).parent
    for name, known in (("chat_template_utils", {"data_utils"}), ("data_utils", set[str]())):
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert {node.module for node in imports if node.level} == known
        assert not any((node.module or "").startswith("trl") for node in imports)


# -- Typer and Python


def test_typer_completes_through_the_classes_and_functions_that_we_extend() -> None:
    for kind in (BashComplete, FishComplete, ZshComplete):
        assert isinstance(kind.name, str)
        assert list(inspect.signature(kind.get_completion_args).parameters) == ["self"]
        assert list(inspect.signature(kind.format_completion).parameters) == ["self", "item"]
    assert CompletionItem("value", help="text").help == "text"
    assert list(inspect.signature(add_completion_class).parameters) == ["cls", "name"]
    parameters = inspect.signature(_completion_shared.get_completion_script).parameters
    assert set(parameters) == {"prog_name", "complete_var", "shell"}
    assert list(inspect.signature(_completion_shared.install).parameters) == ["shell", "prog_name", "complete_var"]
    assert not inspect.signature(_completion_shared._get_shell_name).parameters


def test_typers_commands_parse_their_arguments_in_a_method() -> None:
    assert list(inspect.signature(TyperCommand.parse_args).parameters) == ["self", "ctx", "args"]


def test_generate_gives_a_streamer_the_prompts_and_then_each_new_token(small_model: Path) -> None:
    class Stream(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.got.append(tuple(value.shape))

        def end(self) -> None:
            self.got.append("end")

    stream, model = Stream(), AutoModelForCausalLM.from_pretrained(small_model)
    model.generate(torch.tensor([[5, 6, 7]]), min_new_tokens=2, max_new_tokens=2, streamer=stream)
    assert stream.got == [(1, 3), (1,), (1,), "end"]


def test_typers_groups_look_commands_up_in_a_method_and_its_errors_say_which_option() -> None:
    assert list(inspect.signature(TyperGroup.resolve_command).parameters) == ["self", "ctx", "args"]
    assert list(inspect.signature(TyperGroup.get_help_option).parameters) == ["self", "ctx"]
    assert issubclass(NoArgsIsHelpError, typer.TyperException)
    assert issubclass(typer.Context, Context)
    assert issubclass(TyperGroup, Command)


def test_an_option_of_typer_converts_its_value_in_a_method_and_says_when_there_may_be_none() -> None:
    app = typer.Typer(add_completion=False)

    @app.command()
    def run(seed: int | None = None) -> None: ...

    command = typer.main.get_command(app)
    (option,) = (parameter for parameter in command.params if parameter.name == "seed")
    assert isinstance(option, TyperOption)
    assert list(inspect.signature(TyperOption.process_value).parameters) == ["self", "ctx", "value"]
    assert (option.required, option.multiple, option.callback) == (False, False, None)
    assert option.process_value(Context(command), "3") == 3


def test_registered_exit_functions_can_be_run_before_a_process_is_left_without_its_shutdown() -> None:
    assert callable(atexit._run_exitfuncs)
    code = "import atexit, os; atexit.register(print, 'once', flush=True); atexit._run_exitfuncs(); os._exit(3)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("once\n", 3)


def test_what_multiprocessing_does_at_exit_is_one_function_that_can_be_unregistered() -> None:
    code = "import atexit, multiprocessing.util as util; atexit.unregister(util._exit_function); print('gone')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("gone\n", 0)


def test_python_shows_frames_cached_functions_the_shared_generator_and_a_semaphores_count() -> None:
    assert sys._getframe(0).f_code.co_name == "test_" + inspect.stack()[0].function.removeprefix("test_")
    assert threading.get_ident() in sys._current_frames()
    assert isinstance(functools.cache(len), functools._lru_cache_wrapper)
    assert random._inst.random.__self__ is random.random.__self__  # type: ignore[attr-defined]
    assert threading.Semaphore(2)._value == 2


def source_of(member: object) -> str:
    """The source of a function; empty for anything else."""
    return inspect.getsource(member) if inspect.isfunction(member) else ""


def train_plainly(
    kind: type[GRPOTrainer], model: Path, out: Path, reward: Any, rollout_func: Any = None, **more: Any
) -> GRPOTrainer:
    """Two steps of TRL without aitrain."""
    from datasets import Dataset

    settings: dict[str, Any] = {"max_steps": 2, **more}
    config = GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, **settings, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=4, report_to="none", save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": f"say {number}", "case": number} for number in range(8)])
    trainer = kind(model=str(model), reward_funcs=reward, args=config, train_dataset=rows, rollout_func=rollout_func)
    trainer.train()
    return trainer


def test_whether_zero_3_is_enabled_is_a_reference_of_a_module() -> None:
    """`training/zero.py` sets `_hf_deepspeed_config_weak_ref` to None while a model is loaded whole."""
    source = inspect.getsource(deepspeed_integration.is_deepspeed_zero3_enabled)
    assert "_hf_deepspeed_config_weak_ref is not None" in source


def test_rewards_are_computed_after_the_forward_passes_and_before_the_advantages() -> None:
    """Penalties are subtracted there, see algorithm_trainer.py; the reference model's pass is the last one."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    passes = [found.start() for found in re.finditer(r"_get_per_token_logps_and_entropies\(", source)]
    rewards = source.index("rewards_per_func = self._calculate_rewards(")

    assert len(passes) == 3
    assert (
        source.index("old_per_token_logps, _, _ =")
        < passes[0]
        < source.index("ref_per_token_logps, _, _ =")
        < passes[1]
    )
    assert passes[2] < rewards < source.index("advantages = rewards - mean_grouped_rewards")
    assert source.count("prompt_completion_ids,\n") >= 3


def test_the_loss_makes_one_forward_pass_and_sapo_adds_no_metrics() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)

    assert source.count("_get_per_token_logps_and_entropies(") == 1
    logged = source[source.index('self._metrics[mode]["entropy"].append') :]
    assert "sapo" not in logged
    assert 'self._metrics[mode]["policy_loss"].append(' in source
