"""A run, top to bottom, in the order in which things happen."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, set_seed
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig

from aitrain import activity
from aitrain.batch import BatchPlan, CaseSchedule, plan_batch, schedule_cases
from aitrain.engines.scopes import frozen_heap
from aitrain.environment.contract import Prompt, check_contract, check_methods, level_of
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.environment.tools import Tools
from aitrain.errors import (
    AitrainError,
    CannotWriteError,
    ConfigError,
    DivergedError,
    EnvironmentFailed,
    RunFailed,
    ServerFailed,
)
from aitrain.events import Announce, Ended, Evaluated, Event, Note, Phase
from aitrain.execution.failure import CallFailed
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat, format_for_episodes
from aitrain.rollout.episode import refuse_tools_for_strings
from aitrain.rollout.limits import Limits
from aitrain.runs.checkpoint import (
    PREFIX,
    Best,
    Manifest,
    changed,
    check_whole,
    checkpoints_of,
    clean_partial,
    newest_checkpoint,
    read_manifest,
    refuse_changes,
    step_of,
)
from aitrain.runs.heartbeat import Progress
from aitrain.runs.held_out import before_and_after, bounds_of
from aitrain.runs.metrics_line import MetricsLine, read_metrics
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.runs.run_folder import Result, RunFolder, write_json
from aitrain.training import dataset, saving
from aitrain.training.callbacks import EvalCallback, EvalState, MeanScores, MetricsReporter, StopCallback, StopRequest
from aitrain.training.chat_templates import chat_format
from aitrain.training.checkpoints import CheckpointWriter, RestoreState, explain_write_errors, save_size
from aitrain.training.diagnostics import DiagnosticsCallback, RatioAdvice
from aitrain.training.distributed import explain_timeout, init_processes
from aitrain.training.evaluation import BATCH, HeldOut, Scorings, recorded_before
from aitrain.training.hub import check_hub_token, upload_model
from aitrain.training.model import (
    Precision,
    check_vocabulary,
    choose_precision,
    context_length,
    load_model,
    load_tokenizer,
    lora_config,
)
from aitrain.training.non_finite import check_weights_finite
from aitrain.training.provenance import describe_run, record_environment
from aitrain.training.run_recorder import RunRecorder
from aitrain.training.server_engine import ServedRun, server_engine_factory
from aitrain.training.tracking import About, Tracking
from aitrain.training.trainer import EpisodeTrainer, TrainerHooks, TrainerInputs
from aitrain.training.trl_arguments import (
    Lengths,
    fit_vllm,
    fit_warmup,
    grpo_arguments,
    grpo_config,
    refuse_sharded,
)
from aitrain.training.warm_up import LongestShapes, can_warm_up, longest_shapes, warm_up
from aitrain.training.zero_variance import StopOnZeroVariance
from aitrain.ui.card import try_to_write_card


@dataclass(frozen=True)
class Job:
    """One run to do: what it is, where it lives, on which environment, and whom to tell."""

    config: TrainConfig
    folder: RunFolder
    environment: Any
    announce: Announce
    stop: StopRequest = field(default_factory=StopRequest)
    checkpoint: Path | None = None
    """Where to go on from, None for a new run."""
    runner: EnvRunner | None = None
    """The environment's side, where its processes were started before torch was imported."""
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class Prepared:
    """Everything that training needs, made."""

    trainer: EpisodeTrainer
    held_out: HeldOut
    precision: Precision
    stopper: StopCallback
    standing: EvalState
    evaluator: EvalCallback
    tracking: Tracking
    longest: Callable[[], LongestShapes]
    overlap: int
    """Held-out cases with the prompt of a training case."""


@dataclass(frozen=True)
class Records:
    """Where all that happens is noted: in the run folder, and with trackers."""

    history: RunRecorder
    tracking: Tracking

    def add_rollouts(self, records: list[RolloutRecord]) -> None:
        """Episodes of this process."""
        self.tracking.see(records)
        self.history.add_rollouts(records)


def run(job: Job) -> Result:
    """Train, score before and after, save.

    Raises:
        AitrainError: what went wrong, as the user should read it. What was trained until then is saved, unless it
            went wrong on one of several processes.
    """
    job = replace(job, announce=_noting_phases(job.announce))
    is_first = os.environ.get("RANK", "0") == "0"
    with (
        closing(job.runner or start_runner(job.environment, job.config)) as runner,
        job.folder.run_lock() if is_first else nullcontext(),
        explain_timeout(job.config),
    ):
        if is_first:
            clean_partial(job.folder)
        try:
            return _run(job, runner)
        except ServerFailed:
            job.stop.check()  # who was asked to stop did not wait for the server
            raise


def _noting_phases(announce: Announce) -> Announce:
    """Phases are for the watchdog as well, on every process. Those that load or save move files."""

    def tell(event: Event) -> None:
        if isinstance(event, Phase):
            activity.own.enter(event.text, moves_files=not event.text.startswith(("training", "scoring")))
        announce(event)

    return tell


def _run(job: Job, runner: EnvRunner) -> Result:
    runner.tell = lambda text: job.announce(Note(text))
    prepared = prepare(job, runner)
    with frozen_heap(), closing(prepared.trainer.rollouts), closing(prepared.tracking):
        return _train_and_score(job, prepared)


def _train_and_score(job: Job, prepared: Prepared) -> Result:
    _warm_up(job, prepared)
    before = _score_before(job, prepared)
    start = time.monotonic()
    try:
        _train(job, prepared)
        outcome = Outcome("stopped" if prepared.stopper.stopped else "finished", time.monotonic() - start, before)
        _save(job, prepared)
        if outcome.status == "finished" or job.stop.because is not None:
            outcome = _score_after(job, prepared, outcome)
    except AitrainError as error:
        if _is_everywhere(error) and not isinstance(error, CannotWriteError):
            _go_back(job, prepared.trainer, error)
            _save(job, prepared)
            _finish(job, prepared, Outcome("failed", time.monotonic() - start, before))
        raise
    return _finish(job, prepared, outcome)


def _is_everywhere(error: AitrainError) -> bool:
    """Environments, servers and numbers gone wrong are given up by all processes at once; any other error is one's own,
    and saving would wait for the rest, which in turn wait for it."""
    return isinstance(error, (EnvironmentFailed, ServerFailed, DivergedError)) or PartialState().num_processes == 1


def _go_back(job: Job, trainer: EpisodeTrainer, error: AitrainError) -> None:
    """To the newest checkpoint, or to nothing that could be saved, where the weights themselves have gone wrong."""
    if not isinstance(error, DivergedError) or error.has_finite_weights:
        return
    checkpoint = newest_checkpoint(job.folder, lambda why: job.announce(Note(why)))
    if checkpoint is not None:
        trainer.take_weights(checkpoint)
        job.announce(Note(f"model/ has the weights of {checkpoint.name}."))
    trainer.state.global_step = 0 if checkpoint is None else step_of(checkpoint)


# -- before


def prepare(job: Job, runner: EnvRunner) -> Prepared:
    """Load and check everything, cheapest first, so that what is wrong is said before a model is loaded.

    Raises:
        AitrainError: an option, the environment or the model cannot be used.
    """
    transformers_logging.disable_progress_bar()
    check_methods(job.environment)
    config = job.config
    precision = _precision(job)
    batch = plan_batch(config, init_processes(config, precision))
    arguments = grpo_config(grpo_arguments(config, batch, precision), config, job.folder.checkpoints)
    refuse_sharded(arguments, config)
    check_hub_token(config)
    job.announce(Phase("building the dataset"))
    tokenizer = load_tokenizer(config)
    set_seed(config.seed)
    built = _build(runner, tokenizer)
    dataset.check_chat_template(built[0], tokenizer)
    check_contract(job.environment, dataset.columns(built))
    tools, chat = _conversation(job, chat_format(tokenizer, arguments.chat_template_kwargs), built[0])
    job.stop.check()
    job.announce(Phase(f"loading {config.model}"))
    model = load_model(config, precision.dtype)
    check_weights_finite(model, config.model)
    check_vocabulary(tokenizer, model)
    context = context_length(config, model)
    limit = dataset.PromptLimit(chat, dataset.prompt_limit(config, context), tools.schemas)
    split = _split(job, built, limit, batch.prompts_per_step)
    if config.use_vllm:
        context = fit_vllm(arguments, config, _lengths(job, split, limit, context, runs_tools=len(tools) > 0))
    limits = Limits(config.rl_max_turns, config.rl_max_new_tokens, config.rl_max_episode_tokens, context)
    schedule = _schedule(job, arguments, batch, len(split.train))
    served = ServedRun(config, job.folder, lambda: job.stop.asked, lambda text: job.announce(Note(text)))
    lora, serve = lora_config(config), server_engine_factory(served, context)
    inputs = TrainerInputs(model, tokenizer, arguments, split.train, runner, chat, limits, schedule, lora, serve)
    return _assemble(job, inputs, split, precision)


def _precision(job: Job) -> Precision:
    precision = choose_precision(job.config)
    if precision.dtype == torch.bfloat16 and not job.config.peft:
        job.announce(Note("dtype bfloat16: small updates of such weights round to nothing; float32 keeps them."))
    return precision


def _schedule(job: Job, arguments: GRPOConfig, batch: BatchPlan, cases: int) -> CaseSchedule:
    """How the training cases become steps; TRL is told the number of steps alone."""
    schedule = schedule_cases(job.config, batch, cases)
    arguments.max_steps = schedule.steps
    if schedule.filled:
        job.announce(Note(str(schedule)))
    if note := fit_warmup(arguments):
        job.announce(Note(note))
    return schedule


def _lengths(
    job: Job, split: dataset.DatasetSplit, limit: dataset.PromptLimit, context: int | None, runs_tools: bool
) -> Lengths:
    """Of the longest episode; where the environment goes on until the context is full, that is the context."""
    config, is_one_answer = job.config, level_of(job.environment) == "score_episode" and not runs_tools
    most = config.rl_max_new_tokens if is_one_answer else config.rl_max_episode_tokens
    if most is None:
        return Lengths(context or config.rl_max_turns * config.rl_max_new_tokens, context)
    longest = max(len(limit.chat.prompt_ids(case.prompt, limit.tools)) for case in (*split.train, *split.held_out))
    return Lengths(most, min(longest + most, context or longest + most))


def _build(runner: EnvRunner, tokenizer: PreTrainedTokenizerBase) -> tuple[dataset.Cases, dataset.Cases | None]:
    """The dataset; what building it changed on the environment travels to the processes that it runs in."""
    if runner.processes is None:
        return dataset.build(runner.environment, tokenizer)
    before = dataset.pickled_attributes(runner.environment)
    built = dataset.build(runner.environment, tokenizer)
    try:
        runner.processes.update(dataset.changed_attributes(runner.environment, before))
    except CallFailed as error:
        raise EnvironmentFailed(f"What build_dataset set cannot be had in another process: {error}") from error
    return built


def _conversation(job: Job, chat: ChatFormat, cases: dataset.Cases) -> tuple[Tools, ChatFormat]:
    """The tools that the model is shown, and how conversations are written."""
    tools = _tools(job, chat, cases[0].prompt)
    return tools, _chat(job, chat, tools, cases.is_chat)


def _tools(job: Job, chat: ChatFormat, prompt: Prompt) -> Tools:
    """The environment's tools, with a note where they are JSON schemas that the environment reads the calls of itself.
    A prompt that is a string has no place for schemas."""
    tools = Tools.of(job.environment)
    level = f"{type(job.environment).__name__}.{level_of(job.environment)}"
    is_text = isinstance(prompt, str)
    if not (tools.are_only_shown or (is_text and tools.of_schemas and tools.schemas)):
        return tools
    is_shown = not is_text and chat.prompt_text(prompt, tools.schemas) != chat.prompt_text(prompt)
    why = "the prompts are strings" if is_text else "the chat template has no place for them"
    shown = "The model is shown the schemas of get_tools" if is_shown else f"get_tools is not used: {why}"
    job.announce(Note(f"{shown}; calls in its answers are not run, {level} gets the answers as they are."))
    return tools if is_shown else Tools()


def _chat(job: Job, chat: ChatFormat, tools: Tools, is_chat: bool) -> ChatFormat:
    """How conversations are written: where they go on after an answer, by a template that only appends.

    Raises:
        ConfigError: this model's template does not, or the environment's tools cannot be told to the model.
    """
    if not is_chat:
        refuse_tools_for_strings(tools.schemas)
        return chat
    following = [] if level_of(job.environment) == "score_episode" else ["user"]
    fit = format_for_episodes(chat, [*following, "tool"] if len(tools) else following)
    if fit is not chat:
        job.announce(Note("This model's chat template is not prefix-preserving; TRL's training template is used."))
    return fit


def _split(
    job: Job, built: tuple[dataset.Cases, dataset.Cases | None], limit: dataset.PromptLimit, needed: int
) -> dataset.DatasetSplit:
    split = dataset.split(built, job.config, limit, needed)
    dataset.check_enough(split, needed, limit.tokens)
    for text in _about_split(split, limit.tokens):
        job.announce(Note(text))
    return split


def _about_split(split: dataset.DatasetSplit, limit: int | None) -> Iterator[str]:
    if dropped := split.dropped + split.dropped_held_out:
        yield f"{dropped} cases dropped: their prompt has more than {limit} tokens."
    if split.left_out:
        yield f"{split.left_out} cases are not trained on: they have the same prompt as held-out cases."
    if split.overlap:
        yield (
            f"{split.overlap} of {len(split.held_out)} held-out cases have the same prompt as a training case:"
            " their score does not show what was learned for new ones."
        )
    if not len(split.held_out):
        yield "No held-out cases: there will be no score before and after (--eval-cases)."


def _assemble(job: Job, inputs: TrainerInputs, split: dataset.DatasetSplit, precision: Precision) -> Prepared:
    stopper, history = StopCallback(job.stop), RunRecorder(job.folder, job.checkpoint)

    def tell(text: str) -> None:
        job.announce(Note(text))

    about = _describe(job, inputs.cases, PartialState().num_processes)
    standing = _compare(job, about)
    checkpoints = CheckpointWriter(job.folder, history, about, standing, job.config.save_total_limit)
    records = Records(history, Tracking(About(job.folder, job.config), tell))
    advice, bounds = RatioAdvice.of(job.config, inputs.arguments), bounds_of(job.config.rl_score_range)
    reporter = MetricsReporter(history, job.progress, job.announce)
    callbacks = [records.tracking, reporter, DiagnosticsCallback(tell, advice, bounds)]
    hooks = TrainerHooks(records.add_rollouts, tell, callbacks, checkpoints.save)
    try:
        activity.own.enter("preparing the trainer", moves_files=True)
        trainer = EpisodeTrainer(inputs, hooks)
    except (ValueError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"TRL refuses these settings: {' '.join(str(error).split())[:400]}") from error
    held_out = _held_out(job.config, split.held_out, trainer)
    if job.config.stop_when_flat is not None:
        trainer.add_callback(StopOnZeroVariance(job.config.stop_when_flat, trainer.flat, job.stop.want))
    trainer.add_callback(stopper)
    evaluate = partial(_evaluate_at, job, trainer, held_out, records)
    evaluator = EvalCallback(job.config, evaluate, standing, inputs.schedule.ends_epoch)
    trainer.add_callback(evaluator)
    if job.checkpoint is not None:
        trainer.add_callback(RestoreState(job.checkpoint, trainer, standing.is_same))
    job.progress.pids = gather_object([os.getpid()])
    if trainer.accelerator.is_main_process:
        record_environment(job.folder, job.environment, about.environment)
    longest, tracking = partial(longest_shapes, inputs), records.tracking
    return Prepared(trainer, held_out, precision, stopper, standing, evaluator, tracking, longest, split.overlap)


def _held_out(config: TrainConfig, cases: dataset.Cases, trainer: EpisodeTrainer) -> HeldOut:
    """The held-out cases, scored in batches at least as large as those of training."""
    batch = max(BATCH, trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation)
    return HeldOut(cases, trainer.rollouts, trainer.hooks.write, config.seed, config.eval_samples, batch)


def _describe(job: Job, cases: dataset.Cases, processes: int) -> Manifest:
    """What each checkpoint of this run is made of."""
    environment = describe_run(job.config, job.environment)
    versions = environment["packages"]
    return Manifest(0, job.config.written(), environment, dataset.fingerprint(cases), processes, versions)


SCORED_BY = ("eval_cases", "eval_samples")
"""Options that must be equal for two scorings to be comparable."""


def _compare(job: Job, now: Manifest) -> EvalState:
    """What the checkpoint that this run goes on from knew; nothing of it, for a new run.

    Raises:
        ConfigError: it is another run's.
    """
    if job.checkpoint is None:
        return EvalState()
    before = read_manifest(job.checkpoint)
    changes = changed(before, now, job.config)
    if not job.config.resume_anyway:
        refuse_changes(job.checkpoint, changes)
    elif changes:
        job.announce(Note(f"This run goes on changed, and not exactly: {'; '.join(changes)}"))
    best = before.best if before.best and before.best.step in map(step_of, checkpoints_of(job.folder)) else None
    if best and any(before.config.get(name, now.config[name]) != now.config[name] for name in SCORED_BY):
        best = None
        if job.config.save_best:
            job.announce(Note("--save-best compares new scorings only: earlier ones are of other held-out cases."))
    return EvalState(best, before.owes_evaluation, is_same=not changes)


def _warm_up(job: Job, prepared: Prepared) -> None:
    """Show at once whether the longest episodes fit into the memory, and not after hours, when the first ones come.

    Raises:
        RunFailed: they do not.
    """
    trainer = prepared.trainer
    if not (job.config.warm_up and can_warm_up(trainer)):
        return
    lengths = prepared.longest()
    job.announce(Phase("warming up"))
    try:
        warm_up(trainer, lengths.prompt, lengths.completion)
    except torch.OutOfMemoryError as error:
        where = f"the warm-up, with the longest episodes ({lengths.prompt} + {lengths.completion} tokens)"
        raise _out_of_memory(where, error) from error


def _out_of_memory(where: str, error: torch.OutOfMemoryError) -> RunFailed:
    return RunFailed(
        f"Out of memory in {where}: {' '.join(str(error).split())[:160]}\n"
        "Lower --batch-size (say --rl-prompts-per-step to keep the step as it is), use --peft,\n"
        "or set --rl-kl-coef 0, which saves the reference model."
    )


def _score_before(job: Job, prepared: Prepared) -> Scorings:
    """Of the initial policy. A resumed run has it still, and plays what is not on record: other cases, more samples."""
    job.stop.check()
    held_out = prepared.held_out
    if job.checkpoint is not None:
        return held_out.scores_before(recorded_before(job.folder, held_out.cases))
    _say_scoring(job, held_out)
    scorings = held_out.scores("before")
    _tell_scores(job, prepared.tracking, Evaluated("before", *scorings.means))
    job.stop.check()
    return scorings


def _say_scoring(job: Job, held_out: HeldOut) -> None:
    samples = f", {held_out.samples} samples each" if held_out.samples > 1 else ""
    job.announce(Phase(f"scoring {len(held_out.cases)} held-out cases{samples}"))


# -- during


def _train(job: Job, prepared: Prepared) -> None:
    trainer = prepared.trainer
    if job.checkpoint is not None and trainer.is_over(job.checkpoint):
        return
    job.announce(Phase("training"))
    try:
        trainer.train(resume_from_checkpoint=None if job.checkpoint is None else str(job.checkpoint))
        trainer.rollouts.failures.after_run()
        _check_work(job, trainer)
    except ServerFailed:
        if trainer.state.global_step == 0:
            raise
        trainer.save_checkpoint()
        if not job.stop.anywhere():
            raise
        prepared.stopper.stopped = True
    except AitrainError:
        raise
    except pickle.UnpicklingError as error:
        raise RunFailed(
            f"{job.checkpoint} holds more than numbers: nothing of it was run, and it cannot be gone on from.\n"
            "Take another one with --resume-from-checkpoint, and mistrust where this one came from."
        ) from error
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(f"step {trainer.state.global_step + 1}", error) from error


def _check_work(job: Job, trainer: EpisodeTrainer) -> None:
    """Say so where there was nothing to learn.

    Raises:
        RunFailed: there was no optimizer step at all.
    """
    if trainer.state.global_step == 0:
        raise RunFailed("There was no optimizer step: nothing was trained\nSee train.log in the run folder.")
    if not trainer.updates:
        since = f" after {job.checkpoint.name}" if job.checkpoint else ""
        masked = ", or were truncated (--rl-mask-truncated-completions)" if trainer.masks_truncated else ""
        skipped = f", and {trainer.finite.skipped} steps were skipped" if trainer.finite.skipped else ""
        job.announce(
            Note(
                f"No step{since} had anything to learn from: in every group all completions scored the same, or had no"
                f" score{masked}{skipped}."
            )
        )


def _evaluate_at(job: Job, trainer: EpisodeTrainer, held_out: HeldOut, records: Records, step: int) -> MeanScores:
    _say_scoring(job, held_out)
    sampled, greedy = held_out.scores(f"step{step}").means
    if trainer.accelerator.is_main_process and sampled is not None:
        scored = MetricsLine(step=step, eval_score=sampled, eval_greedy=greedy)
        line = replace(scored, eval_cases=len(held_out.cases), eval_samples=held_out.samples)
        records.history.add_metrics(line)
        _tell_scores(job, records.tracking, Evaluated(f"step {step}", sampled, greedy))
    activity.own.enter("training")
    return sampled, greedy


def _tell_scores(job: Job, tracking: Tracking, scores: Evaluated) -> None:
    job.announce(scores)
    tracking.take(scores)


# -- after


@dataclass(frozen=True)
class Outcome:
    """How a run ended, with the scores of the initial policy and of model/."""

    status: str
    seconds: float
    before: Scorings
    after: Scorings = field(default_factory=Scorings)
    best: Best | None = None
    """With --save-best: the step that model/ is of, and the scores that it was chosen by."""


def _save(job: Job, prepared: Prepared) -> None:
    """The model as it is now. After a failure before the first step there is nothing to save."""
    trainer = prepared.trainer
    if trainer.state.global_step == 0:
        return
    job.announce(Phase("saving"))
    with explain_write_errors(job.folder, save_size(trainer, with_optimizer=False)):
        saving.save_model(trainer, job.folder)
        if job.config.peft and job.config.merge_adapter and trainer.accelerator.is_main_process:
            saving.merge_adapter(trainer, job.folder, job.config, prepared.precision.dtype)
    trainer.accelerator.wait_for_everyone()


def _score_after(job: Job, prepared: Prepared, outcome: Outcome) -> Outcome:
    """Of model/. The best of several scorings is higher than the policy's score is, by luck: so what --save-best has
    chosen is scored with new samples."""
    best = _take_best(job, prepared) if job.config.save_best else None
    _say_scoring(job, prepared.held_out)
    policy_step = None if best is None else best.step
    scorings = prepared.held_out.scores("after", policy_step, fresh=best is not None)
    _tell_scores(job, prepared.tracking, Evaluated("after", *scorings.means))
    return replace(outcome, after=scorings, best=best)


def _take_best(job: Job, prepared: Prepared) -> Best | None:
    """With --save-best, model/ becomes the first step with the highest score, where that is not the last one."""
    last = prepared.trainer.state.global_step
    prepared.evaluator.score_last_step(last)
    best = prepared.standing.best
    if best is None:
        return None
    job.announce(Note(f"The best held-out score was {best.score:.3f} after step {best.step}: model/ is of that step."))
    if best.step != last:
        checkpoint = job.folder.checkpoints / f"{PREFIX}{best.step}"
        check_whole(checkpoint)
        prepared.trainer.take_weights(checkpoint)
        _save(job, prepared)
    return best


def _finish(job: Job, prepared: Prepared, outcome: Outcome) -> Result:
    """result.json and the model card, from the first process; the model goes to the Hub when asked for."""
    state = prepared.trainer.state
    job.progress.status, job.progress.step = outcome.status, state.global_step
    values = _result_values(job, prepared, outcome)
    if prepared.trainer.accelerator.is_main_process and state.global_step > 0:
        write_json(job.folder.result, values)
        if problem := try_to_write_card(job.folder):
            job.announce(Note(problem))
        if job.config.push_to_hub and outcome.status == "finished":
            job.announce(Phase("uploading"))
            job.announce(Note(f"Uploaded to {upload_model(job.config, job.folder.model)}"))
    if outcome.status != "failed":
        job.announce(
            Ended(outcome.status, state.global_step, job.stop.because if outcome.status == "stopped" else None)
        )
    names = [name for name in Result.__dataclass_fields__ if name != "folder"]
    return Result(folder=job.folder.path, **{name: values[name] for name in names})


def _result_values(job: Job, prepared: Prepared, outcome: Outcome) -> dict[str, Any]:
    steps = prepared.trainer.state.global_step
    return {
        "status": outcome.status,
        "stopped_because": _why_stopped(job.stop) if outcome.status == "stopped" else None,
        "steps": steps,
        "model_step": steps if outcome.best is None else outcome.best.step,
        "seconds": round(outcome.seconds, 3),
        **_score_values(job, prepared, outcome),
        "eval_cases": len(prepared.held_out.cases),
        "eval_samples": prepared.held_out.samples,
        "eval_overlap": prepared.overlap,
        "train_cases": len(prepared.trainer.cases),
        "model": str(job.folder.model.resolve()),
        "base_model": job.config.model,
        "environment": type(job.environment).__qualname__,
        "seed": job.config.seed,
        "vllm_restarts": _vllm_restarts(prepared.trainer),
    }


def _score_values(job: Job, prepared: Prepared, outcome: Outcome) -> dict[str, Any]:
    """The scores before and after, those that --save-best chose by, and all with their intervals."""
    (score_before, greedy_before), (score_after, greedy_after) = outcome.before.means, outcome.after.means
    scorings = {"before_sampled": outcome.before.sampled, "before_greedy": outcome.before.greedy}
    scorings |= {"after_sampled": outcome.after.sampled, "after_greedy": outcome.after.greedy}
    best = outcome.best
    return {
        "score_before": score_before,
        "score_after": score_after,
        "greedy_before": greedy_before,
        "greedy_after": greedy_after,
        "selection_score": best and best.score,
        "selection_greedy": best and best.greedy,
        "selection_scorings": best and _comparable_scorings(job, prepared.held_out),
        "scores": before_and_after(scorings, bounds_of(job.config.rl_score_range), job.config.eval_samples),
    }


def _comparable_scorings(job: Job, held_out: HeldOut) -> int:
    """Scorings during the training of as many held-out cases and samples as there are now; earlier parts of a resumed
    run may have had others."""
    cases, samples = len(held_out.cases), held_out.samples
    scorings = [line for line in read_metrics(job.folder.metrics) if line.is_scoring]
    return sum(line.eval_cases in (None, cases) and line.eval_samples in (None, samples) for line in scorings)


def _vllm_restarts(trainer: EpisodeTrainer) -> int:
    """How often a vLLM server came back and was given the weights again."""
    return 0 if trainer.rollouts.server is None else trainer.rollouts.server.restarts


def _why_stopped(stop: StopRequest) -> str:
    return stop.because or "it was asked to: Ctrl-C, SIGTERM, or its parent was gone"


def part_in_peace() -> None:
    """Processes leave together: one that is gone while another still talks to it would make that one abort."""
    state = PartialState()
    if state.num_processes > 1:
        state.wait_for_everyone()
        state.destroy_process_group()
