"""A model that plays environments outside of training: the engine, limits and episodes are those of a run."""

from __future__ import annotations

import torch
from rich.console import Console
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from aitrain.engines.hf import HFEngine, HFModel
from aitrain.engines.sampling import Sampling
from aitrain.environment.contract import env_kind
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.environment.tools import Tools
from aitrain.errors import EnvironmentFailed
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat, format_for_episodes
from aitrain.rollout.engine import Decoding
from aitrain.rollout.episode import Episode, Rollout
from aitrain.rollout.event_loop import EventLoop
from aitrain.rollout.limits import EndOfTurn, Limits
from aitrain.training.chat_templates import chat_format
from aitrain.training.dataset import check_chat_template
from aitrain.training.model import check_vocabulary, choose_precision, context_length, load_model, load_tokenizer
from aitrain.workbench.episode_view import show_ended, show_heading, show_text
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.play import PlayOptions, chosen_case, show_title


def policy_rollout(opened: OpenedEnvironment, config: TrainConfig, runner: EnvRunner | None = None) -> Rollout:
    """Rollouts of the environment with the model of the options, by transformers; close its `runner` at the end, unless
    it was given.

    Raises:
        AitrainError: the model cannot be loaded, or not play the environment.
    """
    transformers_logging.disable_progress_bar()
    tokenizer = load_tokenizer(config)
    check_chat_template(opened.cases[0].is_chat, tokenizer)
    chat = episode_format(opened, chat_format(tokenizer, config.trl_table("chat_template_kwargs")))
    model = load_model(config, choose_precision(config).dtype).eval()
    if torch.cuda.is_available() and config.quantization is None:
        model.to("cuda")
    check_vocabulary(tokenizer, model)
    sampling, context = Sampling.of(config), context_length(config, model)
    end = EndOfTurn(_eos_ids(model, tokenizer), sampling.stop_strings(tokenizer))
    limits = Limits(config.rl_max_turns, config.rl_max_new_tokens, config.rl_max_episode_tokens, context)
    runner = runner or start_runner(opened.environment, config)
    runner.offer(model, tokenizer)
    return Rollout(runner, HFEngine(HFModel(model, tokenizer), sampling, end, context), chat, limits, end)


def play_model(opened: OpenedEnvironment, config: TrainConfig, options: PlayOptions) -> int:
    """Let the model play one episode, and show it turn by turn; returns the exit code.

    Raises:
        AitrainError: the model cannot play, or the environment failed.
    """
    case = chosen_case(opened.all_cases, options.case)
    rollout, loop = policy_rollout(opened, config), EventLoop()
    try:
        (episode,) = loop.run(rollout.play([case], [options.seed], [options.seed], Decoding.SEEDED))
    finally:
        rollout.runner.close()
        loop.close()
    console = Console(highlight=False)
    show_title(console, opened, case, options, config.model)
    _show_turns(console, episode, rollout.chat)
    if episode.failure_message:
        raise EnvironmentFailed(episode.failure_message)
    show_ended(console, episode.stop, len(episode.trajectory.turns), episode.result)
    return 0


def _show_turns(console: Console, episode: Episode, chat: ChatFormat) -> None:
    """The token ids of the trajectory as text: what the model got, and what it sampled."""
    trajectory = episode.trajectory
    if not trajectory.turns:
        return
    got, ends = trajectory.prompt_ids, [*trajectory.turn_starts[1:], len(trajectory.ids)]
    for number, (start, end) in enumerate(zip(trajectory.turn_starts, ends, strict=True), start=1):
        then = "" if number == 1 else "then "
        show_heading(console, f"turn {number}: the model {then}gets {len(got)} tokens")
        show_text(console, _text(chat, got))
        sampled = sum(trajectory.mask[start:end])
        show_heading(console, f"model answers, {sampled} token{'' if sampled == 1 else 's'}")
        show_text(console, _text(chat, trajectory.ids[start : start + sampled]), "cyan")
        got = trajectory.ids[start + sampled : end]


def _text(chat: ChatFormat, ids: list[int]) -> str:
    return str(chat.tokenizer.decode(ids, skip_special_tokens=False))


def episode_format(opened: OpenedEnvironment, chat: ChatFormat) -> ChatFormat:
    """The chat format for episodes, as in training.

    Raises:
        ConfigError: the template cannot render them.
    """
    if isinstance(opened.cases[0].prompt, str):
        return chat
    kind, has_tools = env_kind(opened.environment), len(Tools.of(opened.environment)) > 0
    following = [] if kind == "score_episode" else ["user"]
    # a rollout says what its tools are when it asks
    may_have_tools = has_tools or (kind == "rollout" and chat.support.has_tool_calls)
    return format_for_episodes(chat, [*following, "tool"] if may_have_tools else following)


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a completion: those of the model, and the tokenizer's."""
    named: object = model.generation_config.eos_token_id
    of_model = named if isinstance(named, list) else [] if named is None else [named]
    return list(dict.fromkeys([*of_model, tokenizer.eos_token_id]))
