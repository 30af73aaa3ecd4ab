"""The rollouts of a trainer: its engine, its environment and the calls that the environment makes of the model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from aitrain.engines.model_proxy import ProxyBatcher
from aitrain.engines.server import VLLMServerEngine
from aitrain.environment.failure_count import FailureCount
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.episode import Rollout
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
        engine = inputs.serve(trainer)
        engine.end, engine.clock = end, clock
        generate = engine.generate_for_environment
        _sync_weights_to(engine, trainer)
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


def _sync_weights_to(engine: VLLMServerEngine, trainer: EpisodeTrainer) -> None:
    """Let TRL's trainer sync its weights to a server that it does not know."""
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    trainer.vllm_generation = TRLServer(engine, trainer)


class TRLServer:
    """What TRL's trainer sees of a vLLM server that it does not know: it syncs weights before a rollout."""

    def __init__(self, engine: VLLMServerEngine, trainer: EpisodeTrainer) -> None:
        self._engine, self._trainer = engine, trainer

    def sync_weights(self) -> None:
        """Load the present weights, unless the server has them."""
        self._engine.load_weights(int(self._trainer.state.global_step))
