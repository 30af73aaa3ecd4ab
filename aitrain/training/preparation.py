"""Prepares a training, or checks one without the weights of its model (`--dry-run`). Cheap checks come first, so that
most errors come before a model is loaded.

Inside API of TRL 1.16 that a dry run uses (tests/training/test_upstream.py):

    GRPOConfig.world_size       replaced: generation batches are divided by it
"""

import hashlib
from dataclasses import dataclass, replace
from functools import partial

import torch
from trl import GRPOConfig, GRPOTrainer

from aitrain.batch import plan_batch, schedule_cases
from aitrain.engines.server_check import ServerNeeds, check_servers
from aitrain.environment.dataset import fingerprint
from aitrain.errors import ConfigError
from aitrain.runs.checkpoint import Manifest, weights_stamp
from aitrain.runs.run_folder import write_json
from aitrain.training.algorithm import AlgorithmParts, custom_callbacks
from aitrain.training.chat_templates import chat_format
from aitrain.training.dataset import ShownCases, begin, longest_episode
from aitrain.training.distributed import init_processes
from aitrain.training.evaluation import BATCH, EvalPlan, mixture_of
from aitrain.training.held_out_scoring import HeldOutScoring
from aitrain.training.holdout import prompt_limit, prompt_limits, split_each
from aitrain.training.model import (
    Precision,
    adapter_error,
    check_vocabulary,
    choose_precision,
    context_length,
    load_model,
    load_tokenizer,
    lora_config,
    model_path,
    model_without_weights,
)
from aitrain.training.run_context import RunContext, keep_sources
from aitrain.training.saving import check_repository
from aitrain.training.sharding import load_once_per_machine, refuse_unsharded
from aitrain.training.tracking import Tracking
from aitrain.training.trainer import EpisodeTrainer, TrainerInputs
from aitrain.training.trainer_checkpoint import (
    restore_state,
    resumed_eval_state,
    save_checkpoint,
)
from aitrain.training.trl_arguments import (
    explain_refusals,
    fit_vllm,
    grpo_arguments,
    grpo_config,
    refuse_fewer_steps,
    refuse_zero_3,
)


@dataclass(frozen=True)
class Prepared:
    """A trainer with its callbacks that a job needs."""

    trainer: EpisodeTrainer
    held_out: HeldOutScoring
    tracking: Tracking


def prepare(context: RunContext) -> Prepared | None:
    """Load and check everything, and make the trainer. Every rank must call this. None after a dry run, which reads no
    weights, asks no vLLM server, and is one process for all ranks.

    Raises:
        AitrainError: an option, the environment or the model cannot be used.
    """
    config = context.config
    precision = choose_precision(config)
    if context.dry_run_of:
        GRPOConfig.world_size = property(lambda _: context.dry_run_of)
    processes = context.dry_run_of or init_processes(config, precision)
    inputs = _inputs(context, precision, processes)
    split = inputs.split
    facts = {
        **context.describe(context.runner),
        "weights": weights_stamp(config.model),
        "chat_template": hashlib.sha256(str(inputs.tokenizer.chat_template).encode()).hexdigest(),
        "processes": processes,
    }
    manifest = Manifest(
        0,
        config.written(),
        facts,
        fingerprint(split.train),
        processes,
        inputs.batch.completions_per_step,
        held_out=fingerprint([*split.held_out, *split.choosing]),
    )
    eval_state = resumed_eval_state(context, manifest)
    context.note(precision.note, "info")
    context.enter("preparing the trainer")
    with explain_refusals():  # when training begins, transformers looks the optimizer up: some need a package or a GPU
        GRPOTrainer.get_optimizer_cls_and_kwargs(inputs.arguments, inputs.model)
    if context.dry_run_of:
        return None
    with explain_refusals():
        trainer = EpisodeTrainer(context, inputs, partial(save_checkpoint, manifest, eval_state))
    trainer.add_callback(tracking := Tracking(context, trainer))
    if config.shares_prompts and trainer.rows_apart:
        context.note(f"The prompt of each completion is computed by itself: {trainer.rows_apart}.", "info")

    batch = max(BATCH, inputs.arguments.per_device_train_batch_size * inputs.arguments.steps_per_generation)
    mixture = mixture_of(context.runner, split.held_out)
    plan = EvalPlan(split.held_out, config.eval_samples, batch_size=batch, mixture=mixture)
    choosing = plan
    if len(split.choosing):
        choosing = replace(plan, cases=split.choosing, mixture=mixture_of(context.runner, split.choosing))
    held_out = HeldOutScoring(context, trainer, plan, choosing, tracking, eval_state)
    trainer.add_callback(held_out)
    if context.checkpoint is not None:
        trainer.watch.restore = partial(restore_state, trainer, context.checkpoint, eval_state.is_same)
    if trainer.accelerator.is_main_process:
        write_json(context.folder.environment, facts)
        keep_sources(context.runner, context.folder)
    return Prepared(trainer, held_out, tracking)


def _inputs(context: RunContext, precision: Precision, processes: int) -> TrainerInputs:
    """The trainer's inputs, without a server's engine."""
    config, is_dry_run = context.config, context.dry_run_of > 0
    begin(context)
    copies = config.distributed_backend != "ddp" and precision.autocast != "no"  # in float32, for the optimizer
    if precision.dtype == torch.bfloat16 and not (config.peft or copies):
        context.note("dtype bfloat16: small updates of the weights are lost to rounding; float32 keeps them.")
    batch = plan_batch(config, processes)
    scores_groups = any(part.scores_groups for part in context.runner.parts.values())
    if scores_groups and batch.prompts_per_step % processes:
        raise ConfigError(
            "rl_prompts_per_step: the environment scores groups together, so each process plays whole ones\n"
            f"Give a multiple of the {processes} processes."
        )
    refuse_unsharded(config, "cpu" if precision.use_cpu else "cuda")
    arguments = grpo_config(grpo_arguments(config, batch, precision), config, context.folder.checkpoints)
    refuse_zero_3(arguments)
    if config.push_to_hub:
        check_repository(config)
    algorithm, callbacks = AlgorithmParts.of(config), custom_callbacks(config, context.stop.end_run)
    context.enter("loading the tokenizer")
    tokenizer = load_tokenizer(config)
    shown = ShownCases.of(context, chat_format(tokenizer, config), processes)
    context.check_environments(context)

    context.stop.check()
    if is_dry_run:
        model = model_without_weights(config, precision.dtype)
    else:
        context.enter(f"loading {config.model}")
        load_once_per_machine(arguments)
        model = load_model(config, precision.dtype)
        if hasattr(model, "peft_config"):  # transformers has loaded its base and frozen both
            raise adapter_error(config.model)

    check_vocabulary(tokenizer, model)
    context_tokens = context_length(config, model.config)
    most = prompt_limit(config, context_tokens)
    prompts = prompt_limits(context.runner, shown.chat, most, shown.tools)
    split = split_each(shown.built, config, prompts, batch.prompts_per_step)
    schedule = schedule_cases(config, batch, len(split.train))
    arguments.max_steps = schedule.steps  # TRL knows no more of the schedule
    if schedule.steps == 1:
        arguments.warmup_steps = 0  # the only step would have a learning rate of 0
    context.note(f"{split}, {schedule.steps} steps.", "info")
    for text in split.notes(most):
        context.note(text)
    if config.use_vllm:
        new_tokens = shown.most_new_tokens(context.runner)
        cases = (*split.train, *split.held_out, *split.choosing)
        whole = longest_episode(cases, prompts, new_tokens, context_tokens)
        completion = new_tokens or context_tokens or config.rl_max_turns * config.completion_tokens
        context_tokens = fit_vllm(arguments, config, completion, whole)
    if context.checkpoint is not None:
        refuse_fewer_steps(context.checkpoint, schedule.steps)
    server = None
    if config.weight_sync is not None and not is_dry_run:
        rank = config.lora_r if config.weight_sync == "adapter" else None
        needs = ServerNeeds(model_path(config.model), context_tokens or 0, rank)
        server = check_servers(config.vllm_server_urls, needs)
    return TrainerInputs(
        model, tokenizer, arguments, split, context.runner, shown.chat, context_tokens, prompts, schedule, batch,
        lora_config(config, model), algorithm, callbacks, server,
    )  # fmt: skip
