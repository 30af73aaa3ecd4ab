"""How a model is shown an environment: its tools, and the chat format of whole conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from transformers.utils import logging as transformers_logging

from aitrain.environment.contract import Case, Prompt, check_methods, env_kind
from aitrain.environment.dataset import Datasets
from aitrain.environment.runner import Runner
from aitrain.environment.tools import Tools
from aitrain.rollout.chat_format import ChatFormat, format_for_episodes
from aitrain.rollout.episode import refuse_tools_for_strings
from aitrain.rollout.message_format import MessageFormat
from aitrain.training.dataset import build_datasets, check_chat_template
from aitrain.training.holdout import PromptLimit
from aitrain.training.run_context import RunContext

Note = Callable[[str], object]
"""Shows the user a note."""


def tools_shown(environment: object, chat: ChatFormat, is_chat: bool, note: Note) -> Tools:
    """The tools that the model is shown, with a note if they are JSON schemas whose calls the environment parses
    itself; string prompts cannot show these."""
    tools = Tools.of(environment)
    if not (tools.are_only_shown or (not is_chat and tools.of_schemas and tools.schemas)):
        return tools
    asked: Prompt = [{"role": "user", "content": "question"}]
    is_shown = is_chat and chat.prompt_text(asked, tools.schemas) != chat.prompt_text(asked)
    if is_shown and env_kind(environment) == "start":  # its objects may take the calls
        return tools
    why = "the chat template has no place for them" if is_chat else "the prompts are strings"
    shown = "The model is shown the schemas of get_tools" if is_shown else f"get_tools is not used: {why}"
    method = f"{type(environment).__name__}.{env_kind(environment)}"
    note(f"{shown}; tool calls in its answers are not run, {method} gets the answers unchanged.")
    return tools if is_shown else Tools()


def begin(context: RunContext) -> None:
    """What comes first in a training and in an eval.

    Raises:
        EnvironmentFailed: an environment lacks a method.
    """
    transformers_logging.disable_progress_bar()
    for name, runner in context.runner.parts.items():
        runner.notify = partial(_note, context.note, name)
        check_methods(runner.environment)


def _note(note: Callable[[str], None], name: str, text: str) -> None:
    """Show a note of an environment, with its name if there are several."""
    note(f"{name}: {text}" if name else text)


@dataclass(frozen=True)
class ShownCases:
    """The datasets and the tools of each environment by its name, and the format that the model is shown them in."""

    built: dict[str, Datasets]
    chat: ChatFormat
    """Renders prompts and, with several turns, whole conversations."""
    tools: dict[str, Tools]

    @classmethod
    def of(cls, context: RunContext, chat: ChatFormat, processes: int) -> ShownCases:
        """Build the datasets of a run.

        Raises:
            EnvironmentFailed: a dataset is wrong.
            ConfigError: this model has no such template, or cannot be shown an environment's tools.
        """
        built, tools = build_datasets(context, chat.tokenizer, processes), dict[str, Tools]()
        for name, runner in context.runner.parts.items():
            if isinstance(chat, MessageFormat):  # the model's server renders it
                tools[name] = Tools.of(runner.environment)
                continue
            is_chat = built[name][0].is_chat or runner.kind == "rollout"
            check_chat_template(is_chat, chat.tokenizer)
            tools[name] = tools_shown(runner.environment, chat, is_chat, runner.notify)
            chat = format_of_episodes(runner.environment, chat, tools[name], is_chat, context.note)
        return cls(built, chat, tools)

    def most_new_tokens(self, runner: Runner) -> int | None:
        """Maximum tokens that follow a prompt; None if only the context limits them."""
        kinds = runner.parts.items()
        is_one_turn = all(part.kind == "score_episode" and not len(self.tools[name]) for name, part in kinds)
        return runner.config.rl_max_new_tokens if is_one_turn else runner.config.rl_max_episode_tokens


def longest_episode(
    cases: Sequence[Case], prompts: Mapping[str, PromptLimit], new_tokens: int | None, context_tokens: int | None
) -> int | None:
    """Maximum tokens of prompt and completions, which vLLM reserves memory for; the model's context if the environment
    may fill it."""
    if new_tokens is None or not cases or any(prompts[case.env].is_open(case) for case in cases):
        return context_tokens
    whole = new_tokens + max(prompts[case.env].length_of(case) for case in cases)
    return min(whole, context_tokens or whole)


def format_of_episodes(environment: object, chat: ChatFormat, tools: Tools, is_chat: bool, note: Note) -> ChatFormat:
    """The chat format for episodes; with several turns, one whose template is prefix-preserving.

    Raises:
        ConfigError: this model has no such template, or cannot be shown the environment's tools.
    """
    if not is_chat:
        refuse_tools_for_strings(tools.schemas)
        return chat
    kind = env_kind(environment)
    following = [] if kind == "score_episode" else ["user"]
    # a rollout says what its tools are when it asks
    may_have_tools = len(tools) > 0 or (kind == "rollout" and chat.support.has_tool_calls)
    fit = format_for_episodes(chat, [*following, "tool"] if may_have_tools else following)
    if fit is not chat:
        note("This model's chat template is not prefix-preserving; TRL's training template is used.")
    return fit
