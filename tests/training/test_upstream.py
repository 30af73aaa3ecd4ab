"""What aitrain leans on inside TRL and transformers: each fact by name, so that a new release says which one moved."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from aitrain.options.trl_fields import trl_fields
from aitrain.training.trainer import EpisodeTrainer

OVERRIDDEN_OR_CALLED = {
    "_generate_and_score_completions": ["inputs"],
    "_generate": ["prompts"],
    "_generate_single_turn": ["prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"],
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
}  # fmt: skip


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


def test_the_settings_replaced_for_greedy_decoding_are_there(small_model: Path, tmp_path: Path) -> None:
    trainer = train_plainly(GRPOTrainer, small_model, tmp_path, lambda prompts, **_: [0.0] * len(prompts))
    assert trainer.generation_config.do_sample is True
    assert trainer.generation_kwargs["max_new_tokens"] == 4
    assert trainer.eos_token_ids == [trainer.processing_class.eos_token_id]


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
