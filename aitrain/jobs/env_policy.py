"""A model that plays environments outside of training: the engine, limits and episodes are those of a run."""

from __future__ import annotations

from rich.console import Console

from aitrain.environment.contract import env_kind
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.errors import EnvironmentFailed
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.engine import Decoding
from aitrain.rollout.episode import Episode, Rollout
from aitrain.rollout.event_loop import EventLoop
from aitrain.runs.model_reference import read_model
from aitrain.training.chat_templates import chat_format
from aitrain.training.dataset import check_chat_template
from aitrain.training.episode_format import format_of_episodes, tools_shown
from aitrain.training.model import load_policy
from aitrain.workbench.episode_view import show_ended, show_heading, show_text
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.play import PlayOptions, chosen_case, episode_json, show_title


def policy_rollout(opened: OpenedEnvironment, config: TrainConfig, runner: EnvRunner | None = None) -> Rollout:
    """Rollouts of the environment with the model of the options, by transformers; close its `runner` at the end, unless
    it was given.

    Raises:
        AitrainError: the model cannot be loaded, or not play the environment.
    """
    policy = load_policy(read_model(config.model), config)
    is_chat = opened.cases[0].is_chat or env_kind(opened.environment) == "rollout"
    check_chat_template(is_chat, policy.tokenizer)
    chat = chat_format(policy.tokenizer, config.trl_table("chat_template_kwargs"))
    tools = tools_shown(opened.environment, chat, is_chat, lambda _: None)
    chat = format_of_episodes(opened.environment, chat, tools, is_chat, lambda _: None)
    runner = runner or start_runner(opened.environment, config)
    runner.offer(policy.model, policy.tokenizer)
    return Rollout(runner, policy.engine(), chat, policy.limits, policy.end)


def play_model(opened: OpenedEnvironment, config: TrainConfig, options: PlayOptions) -> dict[str, object]:
    """Let the model play one episode, and show it turn by turn; returns it for `--json`.

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
    console = Console(highlight=False, quiet=options.as_json)
    show_title(console, opened, case, options, config.model)
    _show_turns(console, episode, rollout.chat)
    if episode.failure_message:
        raise EnvironmentFailed(episode.failure_message)
    turns = len(episode.trajectory.turns)
    show_ended(console, episode.stop, turns, episode.result)
    end = {"stop": episode.stop, "turns": turns}
    return episode_json(case, options, episode.prompt, episode.messages, end, episode.result)


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
