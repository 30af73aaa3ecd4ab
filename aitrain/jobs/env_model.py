"""A model that plays environments outside of training, with the engine, limits and episodes of a run.

`python -m aitrain.jobs.env_model REQUEST` is `aitrain env check` with --tokenizer or --model: the checks of
workbench/check/registry.py, and those that render prompts as the model sees them, or let the model answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import closing
from functools import partial

from aitrain.engines.proxy_batcher import offer_model
from aitrain.environment.contract import Prompt, env_kind
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.errors import AitrainError
from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.episode import Rollout
from aitrain.rollout.event_loop import EventLoop
from aitrain.rollout.limits import limits_of
from aitrain.runs.model_reference import read_model
from aitrain.training.chat_templates import chat_format
from aitrain.training.dataset import shown_episodes
from aitrain.training.loaded_policy import load_policy
from aitrain.training.model import context_length, load_configuration, load_tokenizer
from aitrain.workbench.check import registry
from aitrain.workbench.check.process import Message
from aitrain.workbench.check.registry import EnvCheck, Send
from aitrain.workbench.check.subject import EnvFinding, NotCheckedError, Subject
from aitrain.workbench.opening import OpenedEnvironment, spread
from aitrain.workbench.player import JUNK

PROMPTS = 500
GROUPS, GROUP_SIZE = 8, 4
FLAT = 0.8
"""Fraction of groups with equal scores above which there is too little to learn from."""
CUT_OFF = 0.5


def policy_rollout(opened: OpenedEnvironment, config: TrainConfig, runner: EnvRunner | None = None) -> Rollout:
    """Rollouts of the environment with the model of the options, by transformers; close its `runner` at the end, unless
    it was given.

    Raises:
        AitrainError: the model cannot be loaded, or not play the environment.
    """
    policy = load_policy(read_model(config.model), config)
    is_chat = opened.cases[0].is_chat or env_kind(opened.environment) == "rollout"
    _, chat = shown_episodes(opened.environment, chat_format(policy.tokenizer, config), is_chat)
    runner = runner or start_runner(opened.environment, config)
    scoring = offer_model(runner, policy.model, chat.tokenizer)
    return Rollout(runner, policy.engine(), chat, limits_of(runner, policy.context), policy.end, scoring)


# -- env check


def check(request: Message, send: Send) -> None:
    """Run all checks with the tokenizer of the request's model, and if asked for, with its answers.

    Raises:
        AitrainError: the tokenizer or the environment cannot be loaded.
    """
    config = resolve(TrainConfig, None, request["options"])
    chat = chat_format(load_tokenizer(config), config)
    more = [EnvCheck("tokenizer", "prompts are rendered and fit", partial(prompts, chat), "rows")]
    if request["answers"]:
        more.append(EnvCheck("model", "the model's scores differ", answers))
    registry.check(request, send, chat.tokenizer, more)


def prompts(chat: ChatFormat, subject: Subject) -> Iterator[EnvFinding]:
    """Prompts are rendered by the chat template, and leave room for an answer."""
    opened = subject.play((case, JUNK) for case in subject.sample)
    tools, is_chat = opened[0].reset.tools, not isinstance(opened[0].prompt, str)
    try:
        if is_chat:
            shown_episodes(subject.opened.environment, chat, is_chat)
        asked: list[Prompt] = [case.prompt for case in spread(subject.cases, PROMPTS) if case.prompt]
        if any(episode.reset.prompt is not None for episode in opened):
            asked = [episode.prompt for episode in opened if episode.prompt]
        if not asked:
            raise NotCheckedError("no episode could be opened")
        lengths = sorted(len(chat.prompt_ids(prompt, tools)) for prompt in asked)
    except AitrainError as error:
        fix = "Choose a model with a fitting chat template, or give one with --chat-template FILE."
        yield EnvFinding("fail", str(error), "The run would be refused.", fix)
        return
    config = subject.config
    context = context_length(config, load_configuration(config))
    shown = f"Prompts have {lengths[len(lengths) // 2]} tokens in the middle, {lengths[-1]} at most"
    tight = [length for length in lengths if context is not None and length + config.rl_max_new_tokens > context]
    if context is None or not tight:
        yield EnvFinding("info", f"{shown}; the context of the model is {context or 'unknown'}.")
        return
    long = sum(length >= context for length in tight)
    yield EnvFinding(
        "fail" if long == len(lengths) else "warning",
        f"{shown}: in a context of {context}, {len(tight)} of {len(lengths)} leave less than --rl-max-new-tokens,"
        f" and {long} no room for an answer.",
        "Such cases are left out, or their answers are cut off.",
        "Shorten the prompts, lower --rl-max-new-tokens, or take a model with a longer context.",
    )


def answers(subject: Subject) -> Iterator[EnvFinding]:
    """Scores of a group of answers differ."""
    cases = spread(subject.cases, GROUPS)
    several = [case for case in cases for _ in range(GROUP_SIZE)]
    seeds = [number // GROUP_SIZE for number in range(len(several))]
    rollout = policy_rollout(subject.opened, subject.config, subject.player.runner)
    with closing(EventLoop()) as loop:
        episodes = loop.run(rollout.play(several, seeds, range(len(several))))
    groups = [episodes[place : place + GROUP_SIZE] for place in range(0, len(episodes), GROUP_SIZE)]
    scored = [[e.result.score for e in group if e.result.score is not None] for group in groups]
    flat = [scores for scores in scored if len(set(scores)) < 2]
    all_scores = [score for scores in scored for score in scores]
    mean = f"{statistics.fmean(all_scores):.2f}" if all_scores else "unknown"
    what = (
        f"{GROUP_SIZE} answers to each of {len(cases)} cases: mean score {mean};"
        f" in {len(flat)} of {len(groups)} groups all scores are equal."
    )
    is_flat = len(flat) > FLAT * len(groups)
    yield EnvFinding(
        "warning" if is_flat else "info",
        what,
        "A group with equal scores has no advantage: nothing is learned from it." if is_flat else "",
        "Begin with easier cases, give partial scores, or raise --rl-num-generations." if is_flat else "",
    )
    cut = sum(episode.trajectory.stop == "max_tokens" for episode in episodes)
    if cut > CUT_OFF * len(episodes):
        yield EnvFinding(
            "warning",
            f"{cut} of {len(episodes)} answers were cut off at --rl-max-new-tokens {subject.config.rl_max_new_tokens}.",
            "Answers that are cut off rarely hold the answer, and earn nothing.",
            "Raise --rl-max-new-tokens, or ask for short answers.",
        )


if __name__ == "__main__":
    registry.main(check)
