"""The rollouts of a trainer: its engine, its environment and the calls that the environment makes of the model.

Inside API of TRL 1.16 that it uses (tests/training/test_upstream.py):

    trl.models.utils.unwrap_model_for_generation(model, accelerator, gradient_checkpointing_kwargs=)
                                            called around each generation
    GRPOTrainer.eos_token_ids                                       read
    GRPOTrainer.vllm_generation             given to the engine; replaced: the engine syncs weights itself
    GRPOTrainer.use_vllm, ._last_loaded_step    set, for a server that TRL does not know: _generate() calls
                                            vllm_generation.sync_weights() where global_step is not the last one
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

from accelerate.utils import gather_object
from trl.models.utils import unwrap_model_for_generation

from aitrain.engines.batching import BatchingEngine
from aitrain.engines.colocated import ColocatedEngine
from aitrain.engines.hf import HFEngine
from aitrain.engines.logprob_check import LogprobCheck
from aitrain.engines.proxy_batcher import offer_model
from aitrain.engines.scopes import evaluation_mode, use_device
from aitrain.engines.server import PolicyServer, VLLMServerEngine
from aitrain.engines.server_check import ServerModel
from aitrain.engines.weight_sync import AdapterSync, DiskSync, WeightSync, roomy_folder
from aitrain.execution.failure import FailureCount
from aitrain.options.train import TrainConfig
from aitrain.rollout.end_of_turn import EndOfTurn
from aitrain.rollout.episode import Rollout
from aitrain.rollout.event_loop import ThreadLoop, event_loop
from aitrain.training.distributed import of_first, thread_gather
from aitrain.training.model import count_forward_passes
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.shared_prompts import draws_dropout
from aitrain.vllm.server_arguments import is_here

if TYPE_CHECKING:
    from aitrain.training.trainer import EpisodeTrainer, TrainerInputs

NOT_CALLED = (
    "the model is sharded over all processes, or trains while episodes are played (--rl-ahead): only model.generate is"
    " answered, by vLLM's server (--use-vllm --vllm-mode server)"
)
"""Why an environment cannot call the model itself."""


def make_rollouts(trainer: EpisodeTrainer, inputs: TrainerInputs) -> PolicyRollouts:
    """Rollouts with the trainer's weights, by transformers or vLLM."""
    end = EndOfTurn(trainer.eos_token_ids, trainer.sampling.stop, inputs.tokenizer)
    runner, accelerator = inputs.runner, trainer.accelerator
    context, is_alone, is_ahead = inputs.context_tokens, accelerator.num_processes == 1, runner.config.rl_ahead > 0
    policy = accelerator.unwrap_model(trainer.model)
    count_forward_passes(policy)
    completer: BatchingEngine | VLLMServerEngine | None = None
    engine: HFEngine | ColocatedEngine | VLLMServerEngine
    if inputs.server is not None:
        engine = completer = _served_trainer(trainer, inputs.server, end)
        trainer.use_vllm, trainer._last_loaded_step = True, -1
    elif trainer.use_vllm:
        engine = ColocatedEngine(trainer.vllm_generation, trainer.sampling, end, context)
        completer = None if engine.shared_by else engine
    else:
        shared_by = accelerator if trainer.is_fsdp_enabled and not is_alone else None
        engine = HFEngine(trainer.model, trainer.processing_class, trainer.sampling, end, context, shared_by)
        checkpointing = trainer.args.gradient_checkpointing_kwargs
        engine.unwrapped = lambda: unwrap_model_for_generation(  # without gradient checkpointing
            trainer.model_wrapped, accelerator, gradient_checkpointing_kwargs=checkpointing
        )
        engine.shares_prompts = runner.config.share_prefixes and not draws_dropout(trainer.model)
    if trainer.use_vllm:
        # in the place of TRL's vLLM, as `PolicyRollouts.play` loads the weights into the engine
        trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
    refusal = NOT_CALLED if is_ahead or (trainer.is_fsdp_enabled and not is_alone) else ""
    scoring = offer_model(runner, policy, inputs.chat.tokenizer, completer, refusal)
    return PolicyRollouts(
        Rollout(runner, engine, inputs.chat, context, scoring),
        accelerator,
        trainer.args.seed,
        trainer.run.note,
        FailureCount(runner.config.rl_max_failed),
        evaluating=partial(evaluation_mode, trainer.model),
        weight_version=lambda: int(trainer.state.global_step),
        loop=ThreadLoop(partial(use_device, accelerator.device)) if is_ahead else event_loop(),
        gather=gather_object if is_alone or not is_ahead else thread_gather(trainer.args.ddp_timeout),
    )


# -- vLLM servers that get the weights as files


def notify_difference(
    config: TrainConfig, base: ServerModel, notify: Callable[[str], None]
) -> Callable[[str], None] | None:
    """What to call when a server's log-probabilities differ from the trainer's: `notify` if the base is quantized in
    the trainer or on the server, which explains the difference; None if the difference must end the run."""
    return notify if config.quantization or base.is_quantized else None


def _served_trainer(trainer: EpisodeTrainer, base: ServerModel, end: EndOfTurn) -> VLLMServerEngine:
    """The engine with the trainer's own sampling, which gets the trainer's weights."""
    run, accelerator = trainer.run, trainer.accelerator
    urls = run.config.vllm_server_urls
    model = accelerator.unwrap_model(trainer.model)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    writes = accelerator.is_main_process
    place = roomy_folder(run.folder.path, size) if all(map(is_here, urls)) else run.folder.path / "sync"
    folder = of_first(place)  # rank 0 writes there; other machines would choose another one
    sync: WeightSync = AdapterSync(model, folder, writes)
    if run.config.weight_sync == "disk":
        sync = DiskSync(model, folder, writes, base.dtype)
        sync.renews = base.is_on_cpu
    first = accelerator.process_index % len(urls)  # ranks prefer different servers
    servers = list(map(PolicyServer, urls[first:] + urls[:first]))
    noted = notify_difference(run.config, base, run.note)
    for server in servers:
        server.check = LogprobCheck(model, trainer.processing_class, noted).compare
    engine = VLLMServerEngine(servers, sync, base.name, end, trainer.sampling, base.context)
    engine.give_up_reason = run.give_up_reason
    return engine
