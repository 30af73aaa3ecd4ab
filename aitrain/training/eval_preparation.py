"""Prepares an eval: the cases, the model and its engine, which is transformers, vLLM servers or an address."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from transformers.utils import logging as transformers_logging

from aitrain.batch import plan_batch
from aitrain.engines.batching import Completer
from aitrain.engines.chat_endpoint import ChatEndpoint, served_model
from aitrain.engines.hf import HFEngine
from aitrain.engines.proxy_batcher import offer_model
from aitrain.engines.sampling import Sampling
from aitrain.engines.scopes import evaluation_mode
from aitrain.engines.server import VLLMServerEngine
from aitrain.engines.server_check import ServerNeeds, check_servers
from aitrain.engines.server_fleet import ServerFleet
from aitrain.engines.weight_sync import AdapterSync, WeightVersion
from aitrain.environment.contract import check_methods, named_by
from aitrain.environment.dataset import Datasets
from aitrain.environment.failure_count import FailureCount
from aitrain.environment.loader import errors_of
from aitrain.environment.runner import EnvRunner
from aitrain.environment.tools import Tools
from aitrain.errors import ConfigError
from aitrain.options.evaluate import EvalConfig
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.episode import Rollout
from aitrain.rollout.event_loop import EventLoop
from aitrain.rollout.limits import EndOfTurn, limits_of
from aitrain.rollout.message_format import FILLER, MessageFormat, NotBehindAPI
from aitrain.runs.environment_source import files_of, source_hash
from aitrain.runs.json_values import JsonObject, as_object
from aitrain.runs.model_reference import ModelReference, run_options
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.training.chat_templates import chat_format
from aitrain.training.dataset import build_datasets, check_chat_template
from aitrain.training.distributed import init_processes
from aitrain.training.episode_format import format_of_all
from aitrain.training.evaluation import BATCH, EvalPlan, mixture_of
from aitrain.training.holdout import (
    DatasetSplit,
    PromptLimit,
    cases_to_evaluate,
    joined,
    prompt_limit,
    prompt_limits,
    split,
)
from aitrain.training.model import check_quantization, choose_precision, load_tokenizer, model_path
from aitrain.training.policy_loader import LoadedPolicy, load_policy, tokenizer_folder
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.run_context import RunContext
from aitrain.vllm.adapter_ranks import needed_rank
from aitrain.vllm.client import VLLMClient
from aitrain.vllm.serving import adapter_rank

SERVED_BATCH = 256
"""Episodes at a time with vLLM, which batches them itself."""
REQUESTS_BATCH = 4
"""Episodes of a batch for each request at a time to an address: the slowest one of a batch holds up the next."""


@dataclass(frozen=True)
class PreparedEval:
    """The rollouts of an eval, and what they play."""

    reference: ModelReference
    rollouts: PolicyRollouts
    plan: EvalPlan
    overlap: int
    """Cases that the model was trained on, as far as this is known."""


@dataclass(frozen=True)
class _Shown:
    """The cases, and how the model is shown them."""

    cases: DatasetSplit
    chat: ChatFormat
    prompts: dict[str, PromptLimit]
    """The limit on prompts of each environment."""
    overlap: int = field(default=0)


def prepare_eval(context: RunContext, config: EvalConfig, reference: ModelReference) -> PreparedEval:
    """Load and check everything. Every rank must call this.

    Raises:
        AitrainError: an option, the environment or the model cannot be used.
    """
    transformers_logging.disable_progress_bar()
    context.runner.notify = context.note
    for runner in context.runner.parts.values():
        check_methods(runner.environment)
    if reference.kind == "url":
        return _behind_address(context, config, reference)
    precision = choose_precision(config)
    check_quantization(config)
    processes = init_processes(config, precision)
    accelerator = Accelerator(
        mixed_precision="bf16" if precision.bf16 else "fp16" if precision.fp16 else "no", cpu=precision.use_cpu
    )
    of_base, folder = config.model_copy(update={"model": reference.base}), tokenizer_folder(reference)
    tokenizer = load_tokenizer(of_base, folder, partial(context.note, level="info"))
    built = build_datasets(context, tokenizer, processes)
    context.stop.check()
    context.enter(f"loading {reference.given}")
    with_weights = not config.use_vllm or any(_asks_for_model(one.environment) for one in context.runner.parts.values())
    policy = load_policy(reference, config, with_weights)
    chat = chat_format(tokenizer, config.trl_table("chat_template_kwargs"))
    shown = _shown(context, config, reference, built, chat, policy.context)
    longest = _longest(config, shown, policy.context, not context.runner.has_sessions)
    if not config.use_vllm:
        accelerator.prepare_model(policy.model, evaluation_mode=True)  # the autocast of a training
    engine, clock = make_engine(context, config, reference, policy, longest), RolloutClock()
    engine.clock = clock
    completer: Completer | None = engine if config.use_vllm else None
    scoring = offer_model(context.runner, policy.model, tokenizer, completer)
    limits = limits_of(context.runner, policy.context)
    rollout = Rollout(context.runner, engine, shown.chat, limits, policy.end, scoring, clock)
    rollouts = PolicyRollouts(
        rollout,
        accelerator,
        config.seed,
        context.note,
        FailureCount(context.runner.config.rl_max_failed),
        evaluating=partial(evaluation_mode, policy.model),
        weight_version=lambda: reference.step or 0,
    )
    return _prepared(context, config, reference, rollouts, shown)


def _behind_address(context: RunContext, config: EvalConfig, reference: ModelReference) -> PreparedEval:
    """An eval of a model behind an OpenAI-compatible address, which has no tokenizer and no weights."""
    chat, tokenizer = MessageFormat(NotBehindAPI()), NotBehindAPI()
    engine = endpoint_engine(reference, config, chat)
    reference = replace(reference, name=engine.model)
    built = build_datasets(context, tokenizer, processes=1)
    shown = _shown(context, config, reference, built, chat, None)
    end, clock = EndOfTurn([FILLER]), engine.clock
    limits = limits_of(context.runner, None)
    context.runner.offer(NotBehindAPI("model"), tokenizer)
    rollouts = PolicyRollouts(
        Rollout(context.runner, engine, chat, limits, end, clock=clock),
        Accelerator(cpu=True),
        config.seed,
        context.note,
        FailureCount(context.runner.config.rl_max_failed),
        evaluating=nullcontext,
        weight_version=lambda: 0,
    )
    return _prepared(context, config, reference, rollouts, shown)


def _shown(
    context: RunContext,
    config: EvalConfig,
    reference: ModelReference,
    built: Mapping[str, Datasets],
    chat: ChatFormat,
    context_tokens: int | None,
) -> _Shown:
    runners = context.runner.parts
    if isinstance(chat, MessageFormat):
        tools = {name: Tools.of(runner.environment) for name, runner in runners.items()}
    else:
        for name, runner in runners.items():
            check_chat_template(built[name][0].is_chat or runner.kind == "rollout", chat.tokenizer)
        chat, tools = format_of_all(context, built, chat)
    most = None if isinstance(chat, MessageFormat) else prompt_limit(config, context_tokens)
    prompts = prompt_limits(context.runner, chat, most, tools)
    per_step = plan_batch(config, processes=1).prompts_per_step
    chosen, overlap = dict[str, DatasetSplit](), 0
    for name, share in config.env_shares.items():
        with errors_of(name):
            cases = cases_to_evaluate(built[name], config, prompts[name], math.ceil(per_step * share))
            dropped = cases.dropped_held_out + cases.dropped
            if not len(cases.held_out):
                raise ConfigError(_nothing_to_play(built[name], dropped, prompts[name]))
        if dropped:
            runners[name].notify(f"{dropped} cases dropped: their prompt has more than {most} tokens.")
        if built[name][1] is None:
            overlap += _trained_on(runners[name], reference, built[name], prompts[name], cases)
        else:
            overlap += cases.overlap
        chosen[name] = cases
    everything = joined(chosen, prompts)
    overlap += everything.overlap - sum(one.overlap for one in chosen.values())
    if overlap:
        context.note(
            f"{overlap} of {len(everything.held_out)} cases were trained on, or chose the step (--save-best), or look"
            " the same as such a case: their score does not show what was learned for new prompts."
        )
    return _Shown(everything, chat, prompts, overlap)


def _nothing_to_play(built: Datasets, dropped: int, limit: PromptLimit) -> str:
    rows = len(built[0] if built[1] is None else built[1])
    if dropped >= rows:
        return f"rl_max_prompt_length: all {rows} cases have a prompt of more than {limit.tokens} tokens"
    return (
        f"eval_cases: none of the {rows} cases is held out\nGive their number with --cases; --cases {rows} plays all."
    )


def _trained_on(
    runner: EnvRunner, reference: ModelReference, built: Datasets, limit: PromptLimit, cases: DatasetSplit
) -> int:
    """Number of cases among those that the model's run was trained on, or its step was chosen by; 0 if the run had
    another environment."""
    if reference.run is None:
        return 0
    known = {name: value for name, value in run_options(reference).items() if name in TrainConfig.model_fields}
    run, count = resolve(TrainConfig, None, known), 0
    for name, trained in run.environments.items():
        if _is_same_environment(runner.environment, runner.config, trained, reference.run):
            needed = math.ceil(plan_batch(run, processes=1).prompts_per_step * run.env_shares[name])
            parts = split(built, trained, limit, needed)
            numbers = {case.number for case in (*parts.train, *parts.choosing)}
            count = max(count, sum(case.number in numbers for case in cases.held_out))
    return count


def _is_same_environment(environment: object, config: TrainConfig, trained: TrainConfig, run: Path) -> bool:
    """Whether a run had this environment, also if it was named in another way, or its file has moved."""
    if trained.rl_env_config != config.rl_env_config:
        return False
    if all(getattr(trained, name) == getattr(config, name) for name in ("rl_env", "rl_env_module", "rl_env_class")):
        return True
    made, files = read_object(RunFolder(run).environment), files_of(environment)
    each = as_object(made.get("environments")).values() or [made]
    return any(_is_recorded(as_object(one), environment, files) for one in each)


def _is_recorded(recorded: JsonObject, environment: object, files: list[Path]) -> bool:
    """Whether environment.json has this environment."""
    is_same_file = recorded.get("file") in list(map(str, files)) or recorded.get("sha256") == source_hash(files)
    return bool(files) and recorded.get("class") == type(environment).__qualname__ and is_same_file


def _prepared(
    context: RunContext, config: EvalConfig, reference: ModelReference, rollouts: PolicyRollouts, shown: _Shown
) -> PreparedEval:
    size = _batch_size(config, rollouts.rollout.engine)  # type: ignore[arg-type]
    size = min(size, context.runner.episodes_at_once or size)
    held_out = shown.cases.held_out
    mixture = mixture_of(context.runner, held_out)
    plan = EvalPlan(held_out, config.seed, config.eval_samples, batch_size=size, mixture=mixture)
    return PreparedEval(reference, rollouts, replace(plan, decodings=config.decodings), shown.overlap)


def _batch_size(config: EvalConfig, engine: EvalEngine) -> int:
    """Episodes of a batch. Batches are a part of the plan: a resumed eval plays the same ones, so that its completions
    are the same."""
    if isinstance(engine, ChatEndpoint):
        return REQUESTS_BATCH * engine.concurrency
    if config.concurrency is not None:
        return config.concurrency
    if config.use_vllm:
        return SERVED_BATCH
    batch = plan_batch(config, processes=1)
    return max(BATCH, batch.share)


def _longest(config: EvalConfig, shown: _Shown, context: int | None, is_one_turn: bool) -> int | None:
    """Maximum tokens of prompt and completions, which vLLM reserves memory for; None: the model's context."""
    new_tokens = config.rl_max_new_tokens if is_one_turn else config.rl_max_episode_tokens
    cases = list(shown.cases.held_out)
    prompts = shown.prompts
    if not config.use_vllm or new_tokens is None or not cases or any(prompts[one.env].is_open(one) for one in cases):
        return context
    whole = new_tokens + max(prompts[one.env].length_of(one) for one in cases)
    return min(whole, context or whole)


def _asks_for_model(environment: object) -> bool:
    """Whether the environment's `score_episode` has a parameter for the model."""
    method = getattr(environment, "score_episode", None)
    return method is not None and "model" in (named_by(method) or ("model",))


# -- the engine


EvalEngine = HFEngine | VLLMServerEngine | ChatEndpoint


def make_engine(
    context: RunContext, config: EvalConfig, reference: ModelReference, policy: LoadedPolicy, longest: int | None
) -> HFEngine | VLLMServerEngine:
    """The engine of the options; `longest` is the maximum tokens of an episode, None for the model's context.

    Raises:
        ConfigError: a server cannot be used.
    """
    if not config.use_vllm:
        return policy.engine()
    adapter, rank, path = reference.adapter, adapter_rank(reference), model_path(reference.base)
    needs = ServerNeeds(path, longest or 0, rank and needed_rank(rank), trains=False)
    base = check_servers(config.vllm_server_urls, needs)
    fleet = ServerFleet.of(map(VLLMClient, config.vllm_server_urls), SavedAdapter(adapter or Path(path)))
    fleet.give_up_reason, fleet.notify = context.give_up_reason, context.note
    engine = VLLMServerEngine(fleet, base.name, policy.end, policy.sampling, base.context, has_logprobs=False)
    if adapter is None:
        engine.weight_version = reference.step or 0  # the servers' own weights: nothing is loaded
    return engine


def endpoint_engine(reference: ModelReference, config: EvalConfig, chat: MessageFormat) -> ChatEndpoint:
    """The engine of an OpenAI-compatible address.

    Raises:
        ConfigError: it does not answer, or the model must be named.
    """
    with closing(EventLoop()) as loop:
        name = loop.run(served_model(reference.base, config.model_name))
    return ChatEndpoint(reference.base, name, chat, Sampling.of(config), concurrency=config.concurrency or 16)


class SavedAdapter(AdapterSync):
    """Loads an adapter from the folder in which a run has saved it."""

    def __init__(self, adapter: Path) -> None:
        super().__init__(None, adapter.resolve().parent)
        self._adapter = adapter.resolve()

    def path(self, version: WeightVersion) -> Path:
        """The folder of the adapter."""
        return self._adapter

    def write(self, version: WeightVersion) -> int:
        """No-op: the files exist."""
        return 0
