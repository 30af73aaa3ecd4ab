"""The rollouts of a trainer: its engine, its environment and the calls that the environment makes of the model.

Inside API of TRL 1.16 that it uses (tests/training/test_upstream.py):

    trl.models.utils.unwrap_model_for_generation(model, accelerator, gather_deepspeed3_params=,
                                                 gradient_checkpointing_kwargs=)    called around each generation
    GRPOTrainer._dist.summon_full_params(model, recurse=False)      likewise
    GRPOTrainer.eos_token_ids                                       read
    GRPOTrainer.vllm_generation             given to the engine; replaced: the engine syncs weights itself
    GRPOTrainer.use_vllm, ._last_loaded_step    set, for a server that TRL does not know: _generate() calls
                                            vllm_generation.sync_weights() where global_step is not the last one
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from accelerate.utils import gather_object
from transformers import PreTrainedModel
from trl.models.utils import unwrap_model_for_generation

from aitrain.engines.batching import Completer, largest_over_ranks
from aitrain.engines.colocated import ColocatedEngine
from aitrain.engines.hf import HFEngine, HFModel
from aitrain.engines.proxy_batcher import offer_model
from aitrain.engines.scopes import evaluation_mode
from aitrain.engines.server import VLLMServerEngine
from aitrain.environment.failure_count import FailureCount
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.episode import Rollout
from aitrain.rollout.event_loop import EventLoop, ThreadLoop
from aitrain.rollout.limits import EndOfTurn
from aitrain.training.distributed import thread_gather, use_device
from aitrain.training.model import count_forward_passes
from aitrain.training.policy_rollouts import PolicyRollouts

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer, TrainerInputs


OF_ALL_PROCESSES = (
    "the model is sharded over all processes (--distributed-backend), and only one of them has called it: add"
    " --use-vllm and --vllm-mode server, which answers model.generate"
)
"""Why an environment cannot call a sharded model: the others would not take part."""

WHILE_TRAINING = (
    "the model trains while episodes are played (--rl-ahead): only model.generate is answered, by the vLLM server"
)
"""Why an environment cannot call the model itself with --rl-ahead."""


def make_rollouts(trainer: EpisodeTrainer, inputs: TrainerInputs) -> PolicyRollouts:
    """Rollouts with the trainer's weights, by transformers or vLLM."""
    end = EndOfTurn(trainer.eos_token_ids, trainer.sampling.stop_strings(inputs.tokenizer))
    clock, runner = RolloutClock(), inputs.runner
    engine = _engine(trainer, inputs, end, clock)
    policy = trainer.accelerator.unwrap_model(trainer.model)
    count_forward_passes(policy)
    completer: Completer | None = None
    if isinstance(engine, VLLMServerEngine) or (isinstance(engine, ColocatedEngine) and not engine.is_shared):
        completer = engine
    is_ahead, is_alone = inputs.runner.config.rl_ahead > 0, trainer.accelerator.num_processes == 1
    refusal = OF_ALL_PROCESSES if trainer.is_sharded and not is_alone else WHILE_TRAINING if is_ahead else ""
    scoring = offer_model(runner, policy, inputs.tokenizer, completer, refusal)
    return PolicyRollouts(
        Rollout(runner, engine, inputs.chat, inputs.limits, end, scoring, clock),
        trainer.accelerator,
        trainer.args.seed,
        trainer.hooks.notify,
        FailureCount(runner.config.rl_max_failed),
        evaluating=partial(evaluation_mode, trainer.model),
        weight_version=lambda: int(trainer.state.global_step),
        loop=ThreadLoop(partial(use_device, trainer.accelerator.device)) if is_ahead else EventLoop(),
        gather=gather_object if is_alone or not is_ahead else thread_gather(trainer.args.ddp_timeout),
    )


def _engine(
    trainer: EpisodeTrainer, inputs: TrainerInputs, end: EndOfTurn, clock: RolloutClock
) -> HFEngine | ColocatedEngine | VLLMServerEngine:
    context, accelerator = inputs.limits.context, trainer.accelerator
    if inputs.serve is None and not trainer.use_vllm:
        is_shared = accelerator.num_processes > 1 and trainer.is_sharded
        largest = partial(largest_over_ranks, accelerator) if is_shared else None
        return HFEngine(_hf_model(trainer), trainer.sampling, end, context, clock, largest)
    engine: ColocatedEngine | VLLMServerEngine
    if inputs.serve is None:
        engine = ColocatedEngine(trainer.vllm_generation, trainer.sampling, end, context, clock)
    else:
        engine = inputs.serve(trainer, end)
        engine.clock = clock
        trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = SyncedByEngine()
    return engine


class SyncedByEngine:
    """Replaces TRL's vLLM in the trainer, as `PolicyRollouts.play` loads the weights into the engine."""

    def sync_weights(self) -> None:
        """No-op."""


def _hf_model(trainer: EpisodeTrainer) -> HFModel:
    arguments = trainer.args

    @contextmanager
    def unwrapped() -> Iterator[PreTrainedModel]:
        """The model as TRL generates with it: gathered, and without gradient checkpointing."""
        wrapped = trainer.model_wrapped
        with (
            unwrap_model_for_generation(
                wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=arguments.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=arguments.gradient_checkpointing_kwargs,
            ) as model,
            trainer._dist.summon_full_params(wrapped, recurse=False),
        ):
            yield model

    return HFModel(
        trainer.model,
        trainer.processing_class,
        unwrapped,
        arguments.device,
        arguments.cache_implementation,
    )
