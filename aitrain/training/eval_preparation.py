"""Prepares an eval: the cases, the model and its engine, which is transformers, vLLM servers or an address."""

from __future__ import annotations

import math
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from accelerate import Accelerator

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
from aitrain.environment.contract import named_by
from aitrain.environment.dataset import Datasets
from aitrain.environment.failure_count import FailureCount
from aitrain.environment.loader import errors_of
from aitrain.environment.runner import EnvRunner
from aitrain.errors import ConfigError
from aitrain.options.evaluate import EvalConfig
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.episode import Rollout
from aitrain.rollout.event_loop import EventLoop
from aitrain.rollout.limits import EndOfTurn, limits_of
from aitrain.rollout.message_format import FILLER, MessageFormat, NotBehindAPI
from aitrain.runs.environment_source import source_facts
from aitrain.runs.json_values import as_object
from aitrain.runs.model_reference import ModelReference, run_options
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.training.chat_templates import chat_format
from aitrain.training.distributed import init_processes
from aitrain.training.episode_format import ShownCases, begin, longest_episode
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
from aitrain.training.model import (
    LoadedPolicy,
    check_quantization,
    choose_precision,
    load_policy,
    load_tokenizer,
    model_path,
    tokenizer_folder,
)
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


def prepare_eval(context: RunContext, config: EvalConfig, reference: ModelReference) -> PreparedEval:
    """Load and check everything. Every rank must call this.

    Raises:
        AitrainError: an option, the environment or the model cannot be used.
    """
    begin(context)
    if reference.kind == "url":
        return _behind_address(context, config, reference)
    runner, precision = context.runner, choose_precision(config)
    check_quantization(config)
    processes = init_processes(config, precision)
    accelerator = Accelerator(
        mixed_precision="bf16" if precision.bf16 else "fp16" if precision.fp16 else "no", cpu=precision.use_cpu
    )
    of_base, folder = config.model_copy(update={"model": reference.base}), tokenizer_folder(reference)
    tokenizer = load_tokenizer(of_base, folder, partial(context.note, level="info"))
    shown = ShownCases.of(context, chat_format(tokenizer, config.trl_table("chat_template_kwargs")), processes)
    context.stop.check()
    context.enter(f"loading {reference.given}")
    with_weights = not config.use_vllm or any(_asks_for_model(part.environment) for part in runner.parts.values())
    policy = load_policy(reference, config, with_weights)
    most = prompt_limit(config, policy.context)
    prompts = prompt_limits(runner, shown.chat, most, shown.tools)
    cases, overlap = _cases(context, config, reference, shown, prompts)
    engine: HFEngine | VLLMServerEngine
    if config.use_vllm:
        longest = longest_episode(cases.held_out, prompts, shown.most_new_tokens(runner), policy.context)
        engine = _server_engine(context, config, reference, policy, longest)
    else:
        accelerator.prepare_model(policy.model, evaluation_mode=True)  # the autocast of a training
        engine = policy.engine()
    engine.clock = clock = RolloutClock()
    completer: Completer | None = engine if isinstance(engine, VLLMServerEngine) else None
    scoring = offer_model(runner, policy.model, tokenizer, completer)
    rollouts = PolicyRollouts(
        Rollout(runner, engine, shown.chat, limits_of(runner, policy.context), policy.end, scoring, clock),
        accelerator,
        config.seed,
        context.note,
        FailureCount(runner.config.rl_max_failed),
        evaluating=partial(evaluation_mode, policy.model),
        weight_version=lambda: reference.step or 0,
    )
    size = SERVED_BATCH if config.use_vllm else max(BATCH, plan_batch(config, processes=1).share)
    return PreparedEval(reference, rollouts, _plan(context, config, cases, config.concurrency or size), overlap)


def _behind_address(context: RunContext, config: EvalConfig, reference: ModelReference) -> PreparedEval:
    """An eval of a model behind an OpenAI-compatible address, which has no tokenizer and no weights.

    Raises:
        ConfigError: it does not answer, or the model must be named.
    """
    runner, chat = context.runner, MessageFormat(NotBehindAPI())
    with closing(EventLoop()) as loop:
        name = loop.run(served_model(reference.base, config.model_name))
    concurrency = config.concurrency or 16
    engine = ChatEndpoint(reference.base, name, chat, Sampling.of(config), concurrency=concurrency)
    reference = replace(reference, name=name)
    shown = ShownCases.of(context, chat, processes=1)
    cases, overlap = _cases(context, config, reference, shown, prompt_limits(runner, chat, None, shown.tools))
    for part in runner.parts.values():
        part.offer(NotBehindAPI("model"), chat.tokenizer)
    rollouts = PolicyRollouts(
        Rollout(runner, engine, chat, limits_of(runner, None), EndOfTurn([FILLER]), clock=engine.clock),
        Accelerator(cpu=True),
        config.seed,
        context.note,
        FailureCount(runner.config.rl_max_failed),
        evaluating=nullcontext,
        weight_version=lambda: 0,
    )
    return PreparedEval(reference, rollouts, _plan(context, config, cases, REQUESTS_BATCH * concurrency), overlap)


def _plan(context: RunContext, config: EvalConfig, cases: DatasetSplit, size: int) -> EvalPlan:
    """A resumed eval plays the same batches, so that its completions are the same."""
    mixture = mixture_of(context.runner, cases.held_out)
    return EvalPlan(cases.held_out, config.eval_samples, 0, size, decodings=config.decodings, mixture=mixture)


# -- the cases


def _cases(
    context: RunContext,
    config: EvalConfig,
    reference: ModelReference,
    shown: ShownCases,
    prompts: dict[str, PromptLimit],
) -> tuple[DatasetSplit, int]:
    """The cases to play, and how many of them the model was trained on, as far as this is known."""
    per_step, overlap = plan_batch(config, processes=1).prompts_per_step, 0
    chosen = dict[str, DatasetSplit]()
    for name, share in config.env_shares.items():
        built, limit, runner = shown.built[name], prompts[name], context.runner.parts[name]
        with errors_of(name):
            cases = chosen[name] = cases_to_evaluate(built, config, limit, math.ceil(per_step * share))
            dropped, rows = cases.dropped_held_out + cases.dropped, len(built[0] if built[1] is None else built[1])
            if not len(cases.held_out):
                raise ConfigError(
                    f"rl_max_prompt_length: all {rows} cases have a prompt of more than {limit.tokens} tokens"
                    if dropped >= rows
                    else f"eval_cases: none of the {rows} cases is held out\n"
                    f"Give their number with --cases; --cases {rows} plays all."
                )
        if dropped:
            runner.notify(f"{dropped} cases dropped: their prompt has more than {limit.tokens} tokens.")
        overlap += cases.overlap if built[1] is not None else _trained_on(runner, reference, built, limit, cases)
    everything = joined(chosen, prompts)
    overlap += everything.overlap - sum(cases.overlap for cases in chosen.values())
    if overlap:
        context.note(
            f"{overlap} of {len(everything.held_out)} cases were trained on, or chose the step (--save-best), or look"
            " the same as such a case: their score does not show what was learned for new prompts."
        )
    return everything, overlap


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
    now, recorded = source_facts(environment), read_object(RunFolder(run).environment)
    return any(
        facts.get("class") == now["class"]
        and any(now[name] and facts.get(name) == now[name] for name in ("file", "sha256"))
        for facts in map(as_object, [recorded, *as_object(recorded.get("environments")).values()])
    )


def _asks_for_model(environment: object) -> bool:
    """Whether the environment's `score_episode` has a parameter for the model."""
    method = getattr(environment, "score_episode", None)
    return method is not None and "model" in (named_by(method) or ("model",))


# -- vLLM servers


def _server_engine(
    context: RunContext, config: EvalConfig, reference: ModelReference, policy: LoadedPolicy, longest: int | None
) -> VLLMServerEngine:
    """The engine of vLLM servers; `longest` is the maximum tokens of an episode, None for the model's context.

    Raises:
        ConfigError: a server cannot be used.
    """
    adapter, rank, path = reference.adapter, adapter_rank(reference), model_path(reference.base)
    needs = ServerNeeds(path, longest or 0, rank and needed_rank(rank), trains=False)
    base = check_servers(config.vllm_server_urls, needs)
    fleet = ServerFleet.of(map(VLLMClient, config.vllm_server_urls), SavedAdapter(adapter or Path(path)))
    fleet.give_up_reason, fleet.notify = context.give_up_reason, context.note
    engine = VLLMServerEngine(fleet, base.name, policy.end, policy.sampling, base.context, has_logprobs=False)
    if adapter is None:
        engine.weight_version = reference.step or 0  # the servers' own weights: nothing is loaded
    return engine


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
