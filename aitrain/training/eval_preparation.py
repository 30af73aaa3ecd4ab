"""Prepares an eval: the cases, the model and its engine. Cheap checks come first."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers.utils import logging as transformers_logging

from aitrain.batch import plan_batch
from aitrain.engines.chat_endpoint import ChatEndpoint
from aitrain.engines.proxy_batcher import offer_model
from aitrain.engines.sampling import Completer
from aitrain.engines.scopes import evaluation_mode
from aitrain.environment.adapters import adapter_named
from aitrain.environment.contract import check_methods, env_kind, named_by
from aitrain.environment.dataset import Datasets
from aitrain.environment.failure_count import FailureCount
from aitrain.environment.tools import Tools
from aitrain.errors import ConfigError
from aitrain.options.evaluate import EvalConfig
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.clock import RolloutClock
from aitrain.rollout.episode import Rollout
from aitrain.rollout.limits import EndOfTurn, Limits
from aitrain.rollout.message_format import FILLER, MessageFormat, NotBehindAPI
from aitrain.runs.environment_source import files_of, source_hash
from aitrain.runs.model_reference import ModelReference, run_options
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.training.chat_templates import chat_format
from aitrain.training.dataset import build_dataset, check_chat_template
from aitrain.training.distributed import init_processes
from aitrain.training.episode_format import format_of_episodes, tools_shown
from aitrain.training.eval_engines import EvalEngine, EvalModel, endpoint_engine, make_engine
from aitrain.training.evaluation import BATCH, EvalPlan
from aitrain.training.holdout import DatasetSplit, PromptLimit, cases_to_evaluate, prompt_limit, split
from aitrain.training.model import check_quantization, choose_precision, load_tokenizer
from aitrain.training.policy_loader import load_policy, tokenizer_folder
from aitrain.training.policy_rollouts import PolicyRollouts
from aitrain.training.run_context import RunContext

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
    tools: Tools
    limit: PromptLimit
    overlap: int = field(default=0)


def prepare_eval(context: RunContext, config: EvalConfig, reference: ModelReference) -> PreparedEval:
    """Load and check everything. Every rank must call this.

    Raises:
        AitrainError: an option, the environment or the model cannot be used.
    """
    transformers_logging.disable_progress_bar()
    environment, context.runner.notify = context.runner.environment, context.note
    check_methods(environment)
    if reference.kind == "url":
        return _behind_address(context, config, reference)
    precision = choose_precision(config)
    check_quantization(config)
    processes = init_processes(config, precision)
    accelerator = Accelerator(
        mixed_precision="bf16" if precision.bf16 else "fp16" if precision.fp16 else "no", cpu=precision.use_cpu
    )
    tokenizer = load_tokenizer(config.model_copy(update={"model": reference.base}), tokenizer_folder(reference))
    built = build_dataset(context, tokenizer, processes)
    context.stop.check()
    context.enter(f"loading {reference.given}")
    with_weights = not config.use_vllm or _asks_for_model(environment)
    policy = load_policy(reference, config, with_weights)
    shown = _shown(context, config, reference, built, chat_format(tokenizer, _template_options(config)), policy.context)
    longest = _longest(config, shown, policy.context, env_kind(environment) == "score_episode" and not len(shown.tools))
    model = EvalModel(reference, config, policy, longest, lambda: _give_up_reason(context), context.note)
    engine, clock = make_engine(model, accelerator), RolloutClock()
    engine.clock = clock
    completer: Completer | None = engine if config.use_vllm else None  # type: ignore[assignment]
    scoring = offer_model(context.runner, policy.model, tokenizer, completer)
    rollout = Rollout(context.runner, engine, shown.chat, policy.limits, policy.end, scoring, clock)
    rollouts = PolicyRollouts(
        rollout,
        accelerator,
        config.seed,
        context.note,
        FailureCount(context.runner.config.rl_max_failed),
        evaluating=partial(evaluation_mode, policy.model),
        weight_version=lambda: model.step,
    )
    return _prepared(context, config, reference, rollouts, shown)


def _behind_address(context: RunContext, config: EvalConfig, reference: ModelReference) -> PreparedEval:
    """An eval of a model behind an OpenAI-compatible address, which has no tokenizer and no weights."""
    chat, tokenizer = MessageFormat(NotBehindAPI()), NotBehindAPI()
    engine = endpoint_engine(reference, config, chat)
    reference = replace(reference, name=engine.model)
    built = build_dataset(context, tokenizer, processes=1)
    shown = _shown(context, config, reference, built, chat, None)
    end, clock = EndOfTurn([FILLER]), engine.clock
    limits = Limits(config.rl_max_turns, config.rl_max_new_tokens, config.rl_max_episode_tokens, None)
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
    built: Datasets,
    chat: ChatFormat,
    context_tokens: int | None,
) -> _Shown:
    environment = context.runner.environment
    is_chat = built[0].is_chat or env_kind(environment) == "rollout"
    if isinstance(chat, MessageFormat):
        tools = Tools.of(environment)
    else:
        check_chat_template(is_chat, chat.tokenizer)
        tools = tools_shown(environment, chat, is_chat, context.note)
        chat = format_of_episodes(environment, chat, tools, is_chat, context.note)
    limit = PromptLimit(
        chat,
        None if isinstance(chat, MessageFormat) else prompt_limit(config, context_tokens),
        tools.schemas,
        env_kind(environment) != "score_episode",
    )
    needed = plan_batch(config, processes=1).prompts_per_step
    cases = cases_to_evaluate(built, config, limit, needed)
    dropped = cases.dropped_held_out + cases.dropped
    if not len(cases.held_out):
        raise ConfigError(_nothing_to_play(built, dropped, limit))
    if dropped:
        context.note(f"{dropped} cases dropped: their prompt has more than {limit.tokens} tokens.")
    overlap = cases.overlap if built[1] is not None else _trained_on(context, config, reference, built, limit, cases)
    if overlap:
        context.note(
            f"{overlap} of {len(cases.held_out)} cases were trained on, or look the same as one that was: their score"
            " does not show what was learned for new prompts."
        )
    return _Shown(cases, chat, tools, limit, overlap)


def _nothing_to_play(built: Datasets, dropped: int, limit: PromptLimit) -> str:
    rows = len(built[0] if built[1] is None else built[1])
    if dropped >= rows:
        return f"rl_max_prompt_length: all {rows} cases have a prompt of more than {limit.tokens} tokens"
    return (
        f"eval_cases: none of the {rows} cases is held out\nGive their number with --cases; --cases {rows} plays all."
    )


def _trained_on(
    context: RunContext,
    config: EvalConfig,
    reference: ModelReference,
    built: Datasets,
    limit: PromptLimit,
    cases: DatasetSplit,
) -> int:
    """Number of cases among those that the model's run was trained on; 0 if the run had another environment."""
    if reference.run is None:
        return 0
    known = {name: value for name, value in run_options(reference).items() if name in TrainConfig.model_fields}
    trained = resolve(TrainConfig, None, known)
    if not _is_same_environment(context.runner.environment, config, trained, reference.run):
        return 0
    numbers = set(split(built, trained, limit, plan_batch(trained, processes=1).prompts_per_step).train.numbers)
    return sum(number in numbers for number in cases.held_out.numbers)


def _is_same_environment(environment: object, config: EvalConfig, trained: TrainConfig, run: Path) -> bool:
    """Whether a run had this environment, also if it was named in another way, or its file has moved."""
    if trained.rl_env_config != config.rl_env_config:
        return False
    if all(getattr(trained, name) == getattr(config, name) for name in ("rl_env", "rl_env_module", "rl_env_class")):
        return True
    if any(adapter_named((one.rl_env or "").partition(":")[0]) for one in (config, trained)):
        return False  # one class of ours for many environments
    recorded, files = read_object(RunFolder(run).environment), files_of(environment)
    is_same_file = recorded.get("file") in list(map(str, files)) or recorded.get("sha256") == source_hash(files)
    return bool(files) and recorded.get("class") == type(environment).__qualname__ and is_same_file


def _prepared(
    context: RunContext, config: EvalConfig, reference: ModelReference, rollouts: PolicyRollouts, shown: _Shown
) -> PreparedEval:
    size = _batch_size(config, rollouts.rollout.engine)  # type: ignore[arg-type]
    if context.runner.has_sessions:
        size = min(size, config.rl_env_episodes or size)
    plan = EvalPlan(shown.cases.held_out, config.seed, config.eval_samples, batch_size=size)
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
    return max(BATCH, batch.micro_batch * batch.accumulation)


def _longest(config: EvalConfig, shown: _Shown, context: int | None, is_one_turn: bool) -> int | None:
    """Maximum tokens of prompt and completions, which vLLM reserves memory for; None: the model's context."""
    new_tokens = config.rl_max_new_tokens if is_one_turn else config.rl_max_episode_tokens
    cases = list(shown.cases.held_out)
    if not config.use_vllm or new_tokens is None or not cases or any(map(shown.limit.is_open, cases)):
        return context
    whole = new_tokens + max(map(shown.limit.length_of, cases))
    return min(whole, context or whole)


def _template_options(config: EvalConfig) -> dict[str, Any]:
    return config.trl_table("chat_template_kwargs")


def _asks_for_model(environment: object) -> bool:
    """Whether the environment's `score_episode` has a parameter for the model."""
    method = getattr(environment, "score_episode", None)
    return method is not None and "model" in (named_by(method) or ("model",))


def _give_up_reason(context: RunContext) -> str:
    if context.stop.requested:
        return "The eval was asked to stop."
    return str(context.folder.read_server().get("why", ""))
