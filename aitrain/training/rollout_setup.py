"""The rollouts of a trainer: its engine, its environment and the calls that the environment makes of the model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from aitrain.engines.model_proxy import ProxyBatcher
from aitrain.engines.sampling import CompletionBatch, Sampling
from aitrain.engines.server import VLLMServerEngine
from aitrain.environment.failure_count import FailureCount
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.episode import Rollout
from aitrain.rollout.event_loop import EventLoop
from aitrain.rollout.limits import EndOfTurn
from aitrain.training.model import count_forward_passes
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.scopes import evaluation_mode
from aitrain.training.trainer_engine import TrainerEngine

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer, TrainerInputs


def make_rollouts(trainer: EpisodeTrainer, inputs: TrainerInputs) -> PolicyRollouts:
    """Rollouts with the trainer's weights, by TRL's own generation or by a vLLM server that gets files."""
    end = EndOfTurn(trainer.eos_token_ids, trainer.sampling.stop_strings(inputs.tokenizer))
    clock, runner = RolloutClock(), inputs.runner
    engine: TrainerEngine | VLLMServerEngine
    if inputs.serve is None:
        engine = TrainerEngine(trainer, end, inputs.limits.context, clock)
        generate = engine.by_vllm_for_environment if trainer.use_vllm and not engine.is_shared else None
    else:
        engine = inputs.serve(trainer, end)
        clock, generate = engine.clock, partial(_generate_for_environment, engine)
        trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
        trainer.vllm_generation = SyncedByEngine()
    policy = trainer.accelerator.unwrap_model(trainer.model)
    count_forward_passes(policy)
    proxy = ProxyBatcher(policy, inputs.tokenizer.pad_token_id, generate)
    runner.around, runner.on_call_end = torch.no_grad, lambda: proxy.on_call_end()
    runner.offer(proxy.policy, inputs.tokenizer)

    @asynccontextmanager
    async def scoring() -> AsyncIterator[None]:
        with evaluation_mode(trainer.model):
            async with proxy.serving_calls(lambda: runner.running_calls):
                yield

    return PolicyRollouts(
        Rollout(runner, engine, inputs.chat, inputs.limits, end, scoring, clock),
        trainer.accelerator,
        trainer.args.seed,
        trainer.hooks.tell,
        FailureCount(runner.config.rl_max_failed),
        evaluating=partial(evaluation_mode, trainer.model),
        weight_version=lambda: int(trainer.state.global_step),
    )


class SyncedByEngine:
    """Takes the place of TRL's vLLM in the trainer: `PolicyRollouts.play` loads weights into the engine."""

    def sync_weights(self) -> None:
        """No-op."""


def _generate_for_environment(
    engine: VLLMServerEngine, prompts: list[list[int]], sampling: dict[str, Any]
) -> list[list[int]]:
    """Completions for calls of `model.generate`, which the event loop answers while nothing else runs on it."""
    settings = dict(sampling)
    max_tokens, seeds = settings.pop("max_new_tokens"), settings.pop("seeds", None)
    batch = CompletionBatch(prompts, Sampling(**settings), max_tokens, seeds)
    with closing(EventLoop()) as loop:
        return loop.run(engine.complete(batch))
