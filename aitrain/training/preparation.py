"""Makes the trainer of a run, with its callbacks. Cheap checks come first, so that most errors come before a model is
loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import PreTrainedModel, TrainerCallback
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig

from aitrain.batch import BatchPlan, plan_batch, schedule_cases
from aitrain.environment.contract import Case, check_methods
from aitrain.environment.dataset import Datasets, fingerprint
from aitrain.environment.tools import Tools
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.limits import limits_of
from aitrain.runs.checkpoint import Manifest
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.runs.run_folder import write_json
from aitrain.training.algorithm import AlgorithmParts
from aitrain.training.callbacks import (
    EarlyStop,
    EvalCallback,
    EvalState,
    MetricsReporter,
    StopCallback,
    check_stopping,
    custom_callbacks,
)
from aitrain.training.case_order import load_sampler
from aitrain.training.chat_templates import chat_format
from aitrain.training.dataset import build_datasets, check_chat_template
from aitrain.training.diagnostics import DiagnosticsCallback, run_traits
from aitrain.training.distributed import init_processes
from aitrain.training.episode_format import format_of_all
from aitrain.training.evaluation import BATCH, EvalPlan, mixture_of, note_on_few_cases
from aitrain.training.held_out_scoring import HeldOutScoring
from aitrain.training.holdout import DatasetSplit, PromptLimit, prompt_limit, prompt_limits, split_each
from aitrain.training.hub import check_hub_token
from aitrain.training.model import (
    Precision,
    check_quantization,
    check_vocabulary,
    choose_precision,
    context_length,
    load_model,
    load_tokenizer,
    lora_config,
)
from aitrain.training.non_finite import check_weights_finite
from aitrain.training.provenance import describe_run, keep_sources
from aitrain.training.run_context import RunContext
from aitrain.training.run_recorder import RunRecorder
from aitrain.training.server_engine import server_engine_factory
from aitrain.training.sharding import check_can_shard, load_once_per_machine
from aitrain.training.tracking import Tracking
from aitrain.training.trainer import EpisodeTrainer, TrainerHooks, TrainerInputs
from aitrain.training.trainer_checkpoint import (
    CheckpointWriter,
    RestoreState,
    continue_scorings,
    resumed_eval_state,
)
from aitrain.training.trl_arguments import (
    Lengths,
    check_optimizer,
    explain_refusals,
    fit_vllm,
    fit_warmup,
    grpo_arguments,
    grpo_config,
    note_on_steps,
    refuse_zero_3,
)
from aitrain.training.zero_variance import StopOnZeroVariance


@dataclass(frozen=True)
class Prepared:
    """A trainer with its callbacks, and the other parts that a job needs."""

    context: RunContext
    inputs: TrainerInputs
    trainer: EpisodeTrainer
    split: DatasetSplit
    precision: Precision
    held_out: HeldOutScoring
    eval_state: EvalState
    stopper: StopCallback
    early_stop: EarlyStop
    tracking: Tracking


@dataclass(frozen=True)
class PreparedCases:
    """What a run has before it loads a model. All errors of options and environment that need no model come first."""

    precision: Precision
    batch: BatchPlan
    arguments: GRPOConfig
    tokenizer: PreTrainedTokenizerBase
    built: dict[str, Datasets]
    """Those of each environment by its name."""
    chat: ChatFormat
    """Renders prompts and, with several turns, whole conversations."""
    tools: dict[str, Tools]
    """Those that the model is shown in each environment."""
    algorithm: AlgorithmParts
    callbacks: list[TrainerCallback]
    """Those of --custom-callbacks."""


def prepare(context: RunContext, check_cases: Callable[[dict[str, Datasets]], object] = lambda _: None) -> Prepared:
    """Load and check everything, and make the trainer. Every rank must call this; `check_cases` is called with the
    datasets before the model is loaded.

    Raises:
        AitrainError: an option, the environment or the model cannot be used.
    """
    precision = choose_precision(context.config)
    processes = init_processes(context.config, precision)
    prepared = prepare_cases(context, precision, processes, partial(context.note, level="info"))
    check_cases(prepared.built)
    context.stop.check()
    context.enter(f"loading {context.config.model}")
    load_once_per_machine(prepared.arguments)
    model = load_model(context.config, precision.dtype)
    check_weights_finite(model, context.config.model)
    inputs, parts = fit_to_model(context, prepared, model)
    inputs = replace(inputs, serve=server_engine_factory(context, inputs.limits.context))
    return _assemble(context, inputs, parts, precision)


def prepare_cases(
    context: RunContext, precision: Precision, processes: int, say_awaited: Callable[[str], object]
) -> PreparedCases:
    """The settings of TRL, the dataset, and how the model will be shown it. `say_awaited` gets what is asked of
    the Hub.

    Raises:
        AitrainError: an option or the environment cannot be used.
    """
    arguments, batch = training_arguments(context, precision, processes)
    algorithm, callbacks = AlgorithmParts.of(context.config), custom_callbacks(context.config, context.stop.end_run)
    context.enter("loading the tokenizer")
    tokenizer = load_tokenizer(context.config, say=say_awaited)
    built = build_datasets(context, tokenizer, processes)
    for name, runner in context.runner.parts.items():
        check_chat_template(built[name][0].is_chat or runner.kind == "rollout", tokenizer)
    chat, tools = format_of_all(context, built, chat_format(tokenizer, arguments.chat_template_kwargs))
    return PreparedCases(precision, batch, arguments, tokenizer, built, chat, tools, algorithm, callbacks)


def training_arguments(context: RunContext, precision: Precision, processes: int) -> tuple[GRPOConfig, BatchPlan]:
    """The settings of TRL and the batch, with all that can be checked without a tokenizer and a dataset.

    Raises:
        AitrainError: an option cannot be used, or the environment lacks a method.
    """
    transformers_logging.disable_progress_bar()
    config, context.runner.notify = context.config, context.note
    for runner in context.runner.parts.values():
        check_methods(runner.environment)
    if config.custom_sampler is not None:
        load_sampler(config.custom_sampler)
    check_quantization(config)
    copies = config.distributed_backend != "ddp" and (precision.bf16 or precision.fp16)  # in float32, for the optimizer
    if precision.dtype == torch.bfloat16 and not (config.peft or copies):
        context.note("dtype bfloat16: small updates of the weights are lost to rounding; float32 keeps them.")
    batch = plan_batch(config, processes)
    check_can_shard(config, "cpu" if precision.use_cpu else "cuda")
    arguments = grpo_config(grpo_arguments(config, batch, precision), config, context.folder.checkpoints)
    refuse_zero_3(arguments)
    check_hub_token(config)
    return arguments, batch


def fit_to_model(
    context: RunContext, prepared: PreparedCases, model: PreTrainedModel
) -> tuple[TrainerInputs, DatasetSplit]:
    """The trainer's inputs, without a server's engine, and the split of the dataset; nothing reads the model's weights.

    Raises:
        ConfigError: the dataset does not fit the model's context, or an option does not fit the dataset or the model.
    """
    config, arguments, batch = context.config, prepared.arguments, prepared.batch
    check_vocabulary(prepared.tokenizer, model)
    context_tokens = context_length(config, model)
    most = prompt_limit(config, context_tokens)
    prompts = prompt_limits(context.runner, prepared.chat, most, prepared.tools)
    parts = split_each(prepared.built, config, prompts, batch.prompts_per_step)
    context.note(f"{parts}.", "info")
    for text in parts.notes(most):
        context.note(text)
    if config.use_vllm:
        runners = context.runner.parts.items()
        is_one_turn = all(one.kind == "score_episode" and not len(prepared.tools[name]) for name, one in runners)
        new_tokens = config.rl_max_new_tokens if is_one_turn else config.rl_max_episode_tokens
        context_tokens = fit_vllm(arguments, config, _lengths(config, parts, prompts, new_tokens, context_tokens))
    limits = limits_of(context.runner, context_tokens)

    schedule = schedule_cases(config, batch, len(parts.train))
    arguments.max_steps = schedule.steps  # TRL knows no more of the schedule
    if schedule.filled:
        context.note(str(schedule), "info")
    if note := note_on_few_cases(mixture_of(context.runner, parts.held_out)):
        context.note(note)
    choosing = parts.choosing if len(parts.choosing) else parts.held_out
    if note := check_stopping(config, mixture_of(context.runner, choosing), schedule):
        context.note(note)
    if context.checkpoint is not None and (note := note_on_steps(context.checkpoint, arguments)):
        context.note(note, "info")
    if note := fit_warmup(arguments):
        context.note(note, "info")
    lora = lora_config(config)
    inputs = TrainerInputs(
        model, prepared.tokenizer, arguments, parts.train, context.runner, prepared.chat, limits, schedule,
        pass_limit=batch.limit, trims=batch.trims, peft_config=lora,
        algorithm=prepared.algorithm, callbacks=prepared.callbacks,
    )  # fmt: skip
    return inputs, parts


def run_manifest(context: RunContext, cases: Sequence[Case], facts: dict[str, Any], processes: int) -> Manifest:
    """What a checkpoint of the run says of it, to compare it with the run that resumes from it."""
    return Manifest(0, context.config.written(), facts, fingerprint(cases), processes, facts["packages"])


def _assemble(context: RunContext, inputs: TrainerInputs, parts: DatasetSplit, precision: Precision) -> Prepared:
    """The trainer, and its callbacks in the order in which they are called."""
    config = context.config
    facts = describe_run(context.runner)
    manifest = run_manifest(context, inputs.cases, facts, PartialState().num_processes)
    eval_state = resumed_eval_state(context, manifest)
    recorder, tracking = RunRecorder(context.folder, context.checkpoint), Tracking(context)
    checkpoints = CheckpointWriter(context.folder, recorder, manifest, eval_state, config.save_total_limit)

    def write(records: list[RolloutRecord]) -> None:
        tracking.see(records)
        recorder.add_rollouts(records)

    reporter = MetricsReporter(recorder, context.progress, context.announce)
    diagnostics = DiagnosticsCallback(context.note, recorder, run_traits(config, inputs.arguments))
    callbacks = [tracking, reporter, diagnostics]
    context.enter("preparing the trainer")
    with explain_refusals():
        check_optimizer(inputs.arguments, inputs.model)
        trainer = EpisodeTrainer(inputs, TrainerHooks(write, context.note, callbacks, checkpoints.save))

    batch = max(BATCH, inputs.arguments.per_device_train_batch_size * inputs.arguments.steps_per_generation)
    batch = min(batch, context.runner.episodes_at_once or batch)  # so that all ranks play as many batches
    mixture = mixture_of(context.runner, parts.held_out, parts.train)
    plan = EvalPlan(parts.held_out, config.seed, config.eval_samples, batch_size=batch, mixture=mixture)
    choosing = plan
    if len(parts.choosing):
        choosing = replace(plan, cases=parts.choosing, mixture=mixture_of(context.runner, parts.choosing))
    held_out = HeldOutScoring(context, trainer, plan, choosing, recorder, tracking, diagnostics)
    stopper = StopCallback(context.stop)
    early_stop = EarlyStop(config, eval_state, stopper)
    if config.stop_when_flat is not None:
        trainer.add_callback(StopOnZeroVariance(config.stop_when_flat, trainer.zero_variance, context.stop.end_run))
    trainer.add_callback(stopper)
    trainer.add_callback(EvalCallback(config, held_out.after_step, eval_state, inputs.schedule.ends_epoch))
    trainer.add_callback(early_stop)
    if context.checkpoint is not None:
        continue_scorings(eval_state, trainer, context.checkpoint, choosing)
        trainer.add_callback(RestoreState(context.checkpoint, trainer, eval_state.is_same))
    context.progress.pids = gather_object([os.getpid()])
    if trainer.accelerator.is_main_process:
        write_json(context.folder.environment, facts)
        keep_sources(context.runner, context.folder)
    return Prepared(context, inputs, trainer, parts, precision, held_out, eval_state, stopper, early_stop, tracking)


def _lengths(
    config: TrainConfig,
    parts: DatasetSplit,
    prompts: Mapping[str, PromptLimit],
    new_tokens: int | None,
    context_tokens: int | None,
) -> Lengths:
    """Lengths of the longest episode. `new_tokens` limits what follows the prompt; without a limit, the environment may
    fill the context."""
    if new_tokens is None:
        return Lengths(context_tokens or config.rl_max_turns * config.rl_max_new_tokens, context_tokens)
    cases = [(prompts[case.env], case) for case in (*parts.train, *parts.held_out, *parts.choosing)]
    if context_tokens is not None and any(limit.is_open(case) for limit, case in cases):
        return Lengths(new_tokens, context_tokens)
    whole = new_tokens + max(limit.length_of(case) for limit, case in cases)
    return Lengths(new_tokens, min(whole, context_tokens or whole))
