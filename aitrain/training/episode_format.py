"""How a model is shown an environment: its tools, and the chat format of whole conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aitrain.environment.contract import Prompt, env_kind
from aitrain.environment.dataset import Datasets
from aitrain.environment.tools import Tools
from aitrain.rollout.chat_format import ChatFormat, format_for_episodes
from aitrain.rollout.episode import refuse_tools_for_strings
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


def format_of_all(
    context: RunContext, built: Mapping[str, Datasets], chat: ChatFormat
) -> tuple[ChatFormat, dict[str, Tools]]:
    """The chat format for the episodes of all environments, and the tools that the model is shown in each.

    Raises:
        ConfigError: this model has no such template, or cannot be shown an environment's tools.
    """
    tools = dict[str, Tools]()
    for name, runner in context.runner.parts.items():
        is_chat = built[name][0].is_chat or runner.kind == "rollout"
        tools[name] = tools_shown(runner.environment, chat, is_chat, runner.notify)
        chat = format_of_episodes(runner.environment, chat, tools[name], is_chat, context.note)
    return chat, tools


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
