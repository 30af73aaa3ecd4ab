"""Every option does something: away from its default, what is made of the configuration differs.

A configuration that merely holds another value proves nothing, so each entry names the function that hands the value
on: to TRL, to peft, to an engine, to the environment's calls, to a file or to a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aitrain import TrainConfig
from aitrain.batch import CaseSchedule, plan_batch
from aitrain.engines.sampling import Sampling
from aitrain.environment.contract import Case, parse_score
from aitrain.environment.runner import EnvRunner
from aitrain.options.section import options_of
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.episode import Rollout
from aitrain.training import model
from aitrain.training.algorithm import AlgorithmParts, custom_callbacks
from aitrain.training.batch_source import batch_source
from aitrain.training.model import choose_precision
from aitrain.training.trl_arguments import grpo_arguments, grpo_config
from tests.rollout.scripted import Letters, Scripted, cases
from tests.training.loss_bench import CPU

Observe = Callable[[TrainConfig], object]
MODEL = model.model_without_weights(TrainConfig(model="tiny"), torch.float32)


# -- where effects are seen


def settings(config: TrainConfig) -> object:
    """What TRL and peft are given, what is added to TRL's algorithm, and what becomes of a score of 2."""
    callbacks = [type(one) for one in custom_callbacks(config, print)]
    plan = plan_batch(config, 1)
    made = grpo_arguments(config, plan, CPU), plan, AlgorithmParts.of(config), model.lora_config(config, MODEL)
    return str(made), callbacks, choose_precision(config), parse_score(2.0).in_range(config.score_bounds).score


def trl_config(config: TrainConfig) -> object:
    """TRL's own configuration, `--trl` included."""
    return str(grpo_config(grpo_arguments(config, plan_batch(config, 1), CPU), config, Path("checkpoints")))


def sampled(config: TrainConfig) -> object:
    """The distribution that a token is drawn from, and what else vLLM is told."""
    sampling = Sampling.of(config)
    return sampling.truncated(torch.tensor([[3.0, 2.0, 1.0, -1.0]])).tolist(), sampling.as_vllm([3], 10)


def weights(config: TrainConfig) -> object:
    """What transformers is asked to load, on a machine with a GPU and bitsandbytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.AutoModelForCausalLM, "from_pretrained", lambda path, **options: f"{path} {options}")
        patch.setattr(model, "disable_dropout", lambda _: None)
        patch.setattr(torch.cuda, "is_available", lambda: config.quantization is not None)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
        return model.load_model(config, choose_precision(config).dtype)


def context(config: TrainConfig) -> object:
    """Most tokens of prompt and completion, of a model that states 4,096."""
    text = SimpleNamespace(max_position_embeddings=4096)
    return model.context_length(config, SimpleNamespace(get_text_config=lambda: text))  # type: ignore[arg-type]


class Endless:
    """Goes on after each answer."""

    def episode(self) -> Any:
        while True:
            yield "more"


def limits(config: TrainConfig) -> object:
    """What ends an episode, and when."""
    rollout = Rollout(EnvRunner(Endless(), config), Scripted(lambda _: "x" * 90), ChatFormat(Letters()), None)
    (episode,) = asyncio.run(rollout.play(cases(), [0], [0]))
    return episode.stop, len(episode.trajectory.turns)


def batches(config: TrainConfig) -> object:
    """What chooses the cases of a batch, and how it is played."""
    args: Any = SimpleNamespace(
        seed=0, process_index=0, shuffle_dataset=True, num_generations=2, mask_truncated_completions=False
    )
    rollouts: Any = SimpleNamespace(gather=list)
    cases = [Case(number, "?", {}) for number in range(9)]
    source = batch_source(EnvRunner(None, config), rollouts, cases, CaseSchedule(9, 2, 1, 1), args)
    return type(source).__name__, source.refill_limit


# -- the table

LORA = {"peft": True}
VLLM = {"use_vllm": True}
SERVER = {**VLLM, "vllm_mode": "server"}


EFFECTS: list[tuple[Observe, dict[str, Any], dict[str, Any]]] = [
    (weights, {}, {"model": "tiny", "attn_implementation": "eager", "trust_remote_code": True}),
    (weights, LORA, {"dtype": "bfloat16", "quantization": "int8"}),
    (context, {}, {"model_max_length": 512}),
    (limits, {}, {"rl_max_turns": 3, "rl_max_episode_tokens": 200}),
    (settings, {}, {
        "rl_score_range": "0,3", "seed": 7, "epochs": 3, "max_steps": 3, "logging_steps": 5,
        "rl_prompts_per_step": 6, "batch_size": 4, "gradient_accumulation": 8, "rl_trim_padding": False, "lr": 0.0001,
        "optimizer": "sgd", "scheduler": "cosine", "warmup_ratio": 0.5, "weight_decay": 0.1, "max_grad_norm": 0.5,
        "rl_num_generations": 8, "rl_kl_coef": 0.0, "rl_clip_range": 0.3, "rl_clip_range_high": 0.3,
        "rl_loss_type": "dapo", "rl_scale_rewards": "none",
        "rl_mask_truncated_completions": True, "rl_preset": "gspo", "rl_entropy_coef": 0.01,
        "rl_updates_per_rollout": 4, "rl_max_new_tokens": 64, "rl_temperature": 0.7, "rl_top_k": 20, "rl_top_p": 0.9,
        "use_vllm": True, "save_strategy": "no", "save_steps": 7, "save_total_limit": 3,
        "disable_gradient_checkpointing": True, "ddp_timeout": 60, "rl_overlong_buffer": 20,
        "custom_loss": "tests/environments/extensions.py:likelihood",
        "custom_callbacks": "tests/environments/extensions.py:Counting", "peft": True, "mixed_precision": "bf16",
    }),
    (settings, {"rl_prompts_per_step": 2}, {"tokens_per_pass": 4096}),
    (lambda config: config.shares_prompts, {"disable_gradient_checkpointing": True}, {"share_prefixes": False}),
    (settings, VLLM, {"vllm_gpu_memory_utilization": 0.5, "vllm_sleep_mode": True, "vllm_tensor_parallel_size": 2}),
    (settings, LORA, {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": "q_proj,v_proj"}),
    (settings, {"model": "tiny"}, {"distributed_backend": "fsdp2"}),
    (trl_config, {}, {"trl": {"num_iterations": 2}}),
    (batches, {}, {"rl_sampling": "refill"}),
    (sampled, {}, {"rl_stop": ["</a>"]}),
    (batches, SERVER, {"rl_ahead": 1}),
]  # fmt: skip
"""Where effects are seen, the other options that they take, and of each option a value that is not its default."""
SHOWN_BY_RUNS = {
    "vllm_mode", "vllm_server_url", "log", "rl_env_weights", "eval_samples", "patience",
    "rl_max_prompt_length", "save_best", "push_to_hub", "username", "repo_id", "hub_private", "merge_adapter",
    "eval_steps", "rl_max_failed", "eval_cases", "eval_strategy", "resume_anyway", "resume_from_checkpoint",
    "rl_check", "warm_up", "chat_template", "thinking", "rl_env_episodes", "rl_env_isolation",
    "rl_env_timeout", "rl_env_workers", "rl_env", "rl_env_class", "rl_env_config", "rl_env_module", "master_addr",
    "master_port", "nnodes", "node_rank", "launcher", "num_processes",
    "ray_address", "output_dir", "project_name", "stall_timeout", "vllm_args",
    "vllm_server_gpus", "vllm_servers",
}  # fmt: skip
"""Options whose effect other tests show, by a run or by what is started."""


@pytest.fixture(autouse=True)
def machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder to work in, no GPU, and the test environments where a user's would be."""
    (here / "tests").symlink_to(Path(__file__).parents[1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


CASES = {name: (observe, others, value) for observe, others, values in EFFECTS for name, value in values.items()}


def test_every_option_has_an_entry() -> None:
    """An option that no function and no run shows does nothing: remove it."""
    assert {*CASES, *SHOWN_BY_RUNS} == {option.name for option in options_of(TrainConfig)}


@pytest.mark.parametrize("name", CASES)
def test_an_option_does_something(name: str) -> None:
    observe, others, value = CASES[name]
    without, with_it = TrainConfig(**others), TrainConfig(**others | {name: value})
    assert getattr(without, name) != value
    shown = observe(without)
    assert shown == observe(without), "what is observed differs by itself"
    assert shown != observe(with_it), f"{name} changes nothing: remove it, or let it do what its sentence says"
