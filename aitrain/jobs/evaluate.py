"""The eval job from top to bottom: prepare the cases, the model and its engine, which is transformers, vLLM servers or
an address; play the cases; write the result."""

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, closing, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

from accelerate import Accelerator, PartialState
from accelerate.utils import InitProcessGroupKwargs

from aitrain.batch import plan_batch
from aitrain.engines.chat_endpoint import ChatEndpoint
from aitrain.engines.hf import HFEngine
from aitrain.engines.proxy_batcher import offer_model
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import evaluation_mode, frozen_heap, innermost, use_autocast
from aitrain.engines.server import PolicyServer, VLLMServerEngine
from aitrain.engines.server_check import ServerNeeds, check_servers
from aitrain.engines.weight_sync import AdapterSync
from aitrain.environment.runner import AbsentModel
from aitrain.environment.tools import Tools
from aitrain.errors import ConfigError, Interrupted
from aitrain.events import Ended, Step
from aitrain.execution.failure import FailureCount
from aitrain.options.train import EvalConfig
from aitrain.rollout.episode import Rollout
from aitrain.rollout.message_format import BEHIND_API, MessageFormat
from aitrain.runs.checkpoint import weights_stamp
from aitrain.runs.held_out import Scoring
from aitrain.runs.model_reference import ModelReference, read_model, run_options
from aitrain.runs.records import prompt_key, read_rollouts
from aitrain.runs.result import PHASE, EvalResult, with_scores
from aitrain.runs.run_folder import RunFolder, read_object, write_json
from aitrain.runs.statistics import mean_score
from aitrain.training.chat_templates import chat_format
from aitrain.training.dataset import ShownCases, begin, build_datasets, longest_episode
from aitrain.training.distributed import explain_timeout, init_processes
from aitrain.training.evaluation import BATCH, EvalPhase, EvalPlan, content_of, evaluate, mixture_of
from aitrain.training.holdout import DatasetSplit, prompt_limit, prompt_limits, split_each
from aitrain.training.loaded_policy import load_policy, tokenizer_folder
from aitrain.training.model import choose_precision, load_tokenizer, model_path
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.run_context import RunContext, RunRecorder, keep_sources
from aitrain.training.training_batch import PlayedEpisode
from aitrain.vllm.server_arguments import needed_rank
from aitrain.vllm.server_process import adapter_rank

SERVED_BATCH = 256
"""Episodes at a time with vLLM, which batches them itself."""
REQUESTS_BATCH = 4
"""Episodes of a batch for each request at a time to an address: the slowest one of a batch holds up the next."""


def run(context: RunContext) -> EvalResult | None:
    """Score the cases, and write the result. Every rank must call this; the first one gets the result.

    Raises:
        AitrainError: the eval failed or was stopped; the records of what was scored are kept.
    """
    config = context.config
    assert isinstance(config, EvalConfig)
    with closing(context.runner), explain_timeout(config):
        rollouts, plan, begun = _prepare(context, config, read_model(config.model))
        with frozen_heap(), closing(rollouts):
            return _play_and_score(context, rollouts, plan, begun)


def _play_and_score(
    context: RunContext, rollouts: PolicyRollouts, plan: EvalPlan, begun: EvalResult
) -> EvalResult | None:
    progress, folder, is_main = context.progress, context.folder, PartialState().is_main_process
    steps = len(plan.cases) * sum(len(plan.numbers(name)) for name in plan.decodings)
    progress.steps, progress.step, progress.seconds = steps, 0, 0.0
    began, failed = time.monotonic(), 0

    def after_batch(played: list[PlayedEpisode], scores: Scoring) -> None:
        """Show the progress, and end the eval between two batches if it fails or is to stop."""
        nonlocal failed
        failures = sum(sample.failure is not None for sample in played)
        failed += failures
        done = progress.step = (progress.step or 0) + len(played)
        seconds = time.monotonic() - began
        left = seconds / max(1, done) * (steps - done)
        progress.seconds, progress.ends_at = round(seconds, 3), round(time.time() + left, 1)
        mean = mean_score(scores, plan.mixture)
        context.announce(Step(done, steps, mean, left, failed=failed / max(1, done)))
        scored = sum(sample.score is not None for sample in played)
        dropped = sum(bool(sample.dropped) for sample in played)
        rollouts.failures.after_batch(scored, failures, len(played) - dropped)
        if context.stop.on_any_rank() and done < steps:
            raise Interrupted(f"Stopped after {done} of {steps} episodes.")

    context.enter(f"scoring {len(plan.cases)} cases", moves_files=False)
    step, recorder = begun.model["step"] or 0, RunRecorder(folder, None)
    evaluate(rollouts, plan, EvalPhase(PHASE, step, step), recorder.add_rollouts, after_batch)
    progress.status, progress.ends_at = "finished", None
    if not is_main:
        return None
    result = with_scores(replace(begun, seconds=progress.seconds or 0.0), plan.mixture, read_rollouts(folder.path))
    result.write()
    context.announce(Ended("finished", progress.step))
    return result


# -- preparation


def _prepare(
    context: RunContext, config: EvalConfig, reference: ModelReference
) -> tuple[PolicyRollouts, EvalPlan, EvalResult]:
    """Load and check everything, and write environment.json; returns also the result without scores. Every rank must
    call this.

    Raises:
        AitrainError: an option, the environment or the model cannot be used; an address does not answer.
    """
    begin(context)
    runner, policy = context.runner, None
    if reference.kind == "url":  # there is no tokenizer, and there are no weights
        if isinstance(config.thinking, int):
            raise ConfigError("thinking: a model behind an address takes on, off, low, medium or high, no budget")
        accelerator, chat = Accelerator(cpu=True), MessageFormat(thinking=config.thinking)
        if config.model_name is None:
            raise ConfigError(f"model_name: name the model at {reference.base} with --model-name")
        reference = replace(reference, name=config.model_name)
        built = build_datasets(context, chat.tokenizer, processes=1)
        # its server renders the conversations
        tools = {name: Tools.of(part.environment) for name, part in runner.parts.items()}
        shown, most = ShownCases(built, chat, tools), None
    else:
        precision = choose_precision(config)
        context.note(precision.note, "info")
        processes = init_processes(config, precision)
        accelerator = Accelerator(
            mixed_precision=precision.autocast,
            cpu=precision.use_cpu,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=config.ddp_timeout))],
        )
        of_base, folder = config.model_copy(update={"model": reference.base}), tokenizer_folder(reference)
        tokenizer = load_tokenizer(of_base, folder)
        shown = ShownCases.of(context, chat_format(tokenizer, config), processes)
        context.stop.check()
        context.enter(f"loading {reference.given}")
        policy = load_policy(reference, config, with_weights=not config.use_vllm)
        most = prompt_limit(config, policy.context)
    prompts = prompt_limits(runner, shown.chat, most, shown.tools)
    per_step = plan_batch(config, processes=1).prompts_per_step
    split = split_each(shown.built, config, prompts, per_step, is_eval=True)
    if split.dropped:
        context.note(f"{split.dropped} cases dropped: their prompt has more than {most} tokens.")
    overlap = _note_overlap(context, reference, split)
    model = reference.facts
    if accelerator.is_main_process:
        write_json(context.folder.environment, {**context.describe(runner), "model": model})
        keep_sources(runner, context.folder)
    engine: ChatEndpoint | HFEngine | VLLMServerEngine
    evaluating: Callable[[], AbstractContextManager[None]] = nullcontext
    scoring: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    if policy is None:
        size = REQUESTS_BATCH * (concurrency := config.concurrency or 16)
        engine = ChatEndpoint(
            reference.base, str(config.model_name), chat, Sampling.of(config), concurrency=concurrency
        )
        for part in runner.parts.values():
            part.offer(AbsentModel(why=BEHIND_API), chat.tokenizer)
    else:
        evaluating, completer = partial(evaluation_mode, policy.model), None
        if config.use_vllm:
            longest = longest_episode(split.held_out, prompts, shown.most_new_tokens(runner), policy.context)
            rank, path = adapter_rank(reference), model_path(reference.base)
            needs = ServerNeeds(path, longest or 0, rank and needed_rank(rank), trains=False)
            base = check_servers(config.vllm_server_urls, needs)
            servers = list(map(PolicyServer, config.vllm_server_urls))
            sync = SavedAdapter(reference.adapter or Path(path))
            engine = completer = VLLMServerEngine(servers, sync, base.name, policy.end, policy.sampling, base.context)
            engine.give_up_reason = context.give_up_reason
            if reference.adapter is None:
                engine.weight_version = reference.step or 0  # the servers' own weights: nothing is loaded
            size = config.concurrency or SERVED_BATCH
        else:
            use_autocast(accelerator, innermost(policy.model))
            engine = policy.engine()
            size = config.concurrency or max(BATCH, config.completions_per_pass)
        scoring = offer_model(runner, policy.model, shown.chat.tokenizer, completer)
    context_tokens = None if policy is None else policy.context
    rollouts = PolicyRollouts(
        Rollout(runner, engine, shown.chat, context_tokens, scoring),
        accelerator,
        config.seed,
        context.note,
        FailureCount(runner.config.rl_max_failed),
        evaluating=evaluating,
        weight_version=lambda: reference.step or 0,
    )
    mixture = mixture_of(runner, split.held_out)
    plan = EvalPlan(split.held_out, config.eval_samples, 0, size, decodings=config.decodings, mixture=mixture)
    cases = len(plan.cases)
    begun = EvalResult(
        context.folder.path, model, runner.label, config.seed, cases, config.eval_samples, overlap=overlap
    )
    return rollouts, plan, begun


# -- the cases


def _note_overlap(context: RunContext, reference: ModelReference, split: DatasetSplit) -> int:
    """Number of cases that the model was trained on, or its step was chosen by, as the records of its run say; noted,
    as is what else makes scores mean less."""
    if reference.run is None:  # it has seen none of the training's cases
        return 0
    run, seen, chose = RunFolder(reference.run), set[str](), run_options(reference.run).get("save_best")
    for record in read_rollouts(reference.run):
        is_used = record.discarded is None if not record.eval_phase else chose and record.eval_phase[:4] == "step"
        if is_used and (reference.step is None or record.step <= reference.step):
            seen.add(prompt_key(record.prompt or record.row))
    overlap = max(split.overlap, sum(prompt_key(content_of(case)) in seen for case in split.held_out))
    if overlap:
        context.note(
            f"{overlap} of {len(split.held_out)} cases were trained on, or chose the step (--save-best), or look the"
            " same as such a case: their score does not show what was learned for new prompts."
        )
    before, now = read_object(run.environment).get("weights"), reference.adapter and weights_stamp(reference.base)
    if before and now and before != now:  # what is on the Hub has none
        context.note(f"{reference.base}, the base of {reference.given}, has changed since the training of its adapter.")
    return overlap


# -- vLLM servers


class SavedAdapter(AdapterSync):
    """Loads an adapter from the folder in which a run has saved it."""

    def __init__(self, adapter: Path) -> None:
        super().__init__(None, adapter.resolve().parent)
        self._adapter = adapter.resolve()

    def path(self, version: str) -> Path:
        """The folder of the adapter."""
        return self._adapter

    def write(self, version: str) -> None:
        """No-op: the files exist."""
