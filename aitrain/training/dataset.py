"""The environment's dataset in training: built on the first process, and sent to the others; and how the model is shown
it: the tools, and the chat format of whole conversations.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerate import PartialState
from accelerate.utils import set_seed
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from aitrain.environment.contract import Case, as_messages, check_contract, env_kind
from aitrain.environment.dataset import Datasets, build_cases, columns, dataset_note
from aitrain.environment.runner import EnvRunner, Runner
from aitrain.environment.tools import Tools
from aitrain.errors import ConfigError, EnvironmentFailed, errors_of
from aitrain.execution.failure import CallFailed
from aitrain.rollout.chat_format import ChatFormat, format_for_episodes
from aitrain.training.distributed import of_first
from aitrain.training.holdout import PromptLimit
from aitrain.training.run_context import RunContext

Note = Callable[[str], object]
"""Shows the user a note."""


def begin(context: RunContext) -> None:
    """What comes first in a training and in an eval."""
    transformers_logging.disable_progress_bar()
    for name, runner in context.runner.parts.items():
        runner.notify = partial(_note, context.note, name)


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
            is_chat = built[name][0][0].is_chat or runner.kind == "rollout"
            tools[name], chat = shown_episodes(runner.environment, chat, is_chat, runner.notify)
            asked = as_messages(built[name][0][0].prompt)
            if asked and asked[0]["role"] == "system" and chat.drops_system():
                runner.notify("The chat template leaves system messages out: the model does not see the environment's.")
        return cls(built, chat, tools)

    def most_new_tokens(self, runner: Runner) -> int | None:
        """Maximum tokens that follow a prompt; None if only the context limits them."""
        kinds = runner.parts.items()
        is_one_turn = all(part.kind == "score_episode" and not len(self.tools[name]) for name, part in kinds)
        return runner.config.completion_tokens if is_one_turn else runner.config.rl_max_episode_tokens


def shown_episodes(
    environment: object, chat: ChatFormat, is_chat: bool, note: Note = lambda _: None
) -> tuple[Tools, ChatFormat]:
    """The tools that the model is shown, and the chat format for episodes; with several turns, one whose template is
    prefix-preserving.

    Raises:
        ConfigError: this model has no such template, or cannot be shown the environment's tools; or a thought would
            have to be ended where the environment renders the conversation.
    """
    if is_chat and getattr(chat.tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "chat_template: the prompts are chat messages and this model's tokenizer has no chat template.\n"
            "Choose one with --chat-template chatml, or let build_dataset return prompts that are strings."
        )
    tools, kind = Tools.of(environment), env_kind(environment)
    if not is_chat and tools.of_schemas and tools.schemas:
        note("get_tools is not used: the prompts are strings.")
        tools = Tools()
    elif tools.are_only_shown and kind != "start":  # its objects may take the calls
        method = f"{type(environment).__name__}.{kind}"
        note(f"The schemas of get_tools name no methods: calls in answers are not run, {method} gets them unchanged.")
    if not is_chat:
        if tools.schemas:
            chat.check_tools(is_chat)
        if chat.thinking is not None:
            raise ConfigError(
                "thinking: the chat template switches it, and the prompts are strings"
                '\nLet build_dataset return chat messages: [{"role": "user", "content": "..."}]'
            )
        return tools, chat
    following = [] if kind == "score_episode" else ["user"]
    # a rollout says what its tools are when it asks
    may_have_tools = len(tools) > 0 or (kind == "rollout" and chat.has_tool_calls)
    fit = format_for_episodes(chat, [*following, "tool"] if may_have_tools else following)
    if fit is not chat:
        note("This model's chat template is not prefix-preserving; TRL's training template is used.")
    return tools, fit


def longest_episode(
    cases: Sequence[Case], prompts: Mapping[str, PromptLimit], new_tokens: int | None, context_tokens: int | None
) -> int | None:
    """Maximum tokens of prompt and completions, which vLLM reserves memory for; the model's context if the environment
    may fill it."""
    if new_tokens is None or not cases or any(prompts[case.env].is_open(case) for case in cases):
        return context_tokens
    whole = new_tokens + max(prompts[case.env].length_of(case) for case in cases)
    return min(whole, context_tokens or whole)


# -- the dataset


def build_datasets(context: RunContext, tokenizer: PreTrainedTokenizerBase, processes: int) -> dict[str, Datasets]:
    """The datasets of each environment by its name, with the columns that its methods ask for.

    Raises:
        EnvironmentFailed: a dataset is wrong, or a method has an unknown parameter.
    """
    built, first = dict[str, Datasets](), 0
    for name, runner in context.runner.parts.items():
        context.enter(f"building the dataset{name and f' of {name}'}")
        set_seed(context.config.seed)
        with errors_of(name):
            built[name] = build(runner, tokenizer, processes, name, first)
            check_contract(runner.environment, columns(built[name]))
        first += sum(map(len, built[name]))
        context.note(dataset_note(runner.environment), "info")
    is_chat = {name: train[0].is_chat for name, (train, _) in built.items()}
    if len({*is_chat.values()}) > 1:
        kinds = ", ".join(f"{name} has {'messages' if chat else 'strings'}" for name, chat in is_chat.items())
        raise EnvironmentFailed(f"rl_env: the prompts of all environments must be of one kind: {kinds}")
    return built


def build(runner: EnvRunner, tokenizer: PreTrainedTokenizerBase, ranks: int, name: str, first: int) -> Datasets:
    """Build the datasets of an environment, see `build_cases`. Attributes that building sets on the environment are
    copied to the environment's own processes.

    Of several `ranks` the first one builds, and sends both to the others: each of them could build different rows, and
    scores would belong to other prompts.

    Raises:
        EnvironmentFailed: a dataset is missing, empty, or has invalid prompts, or something cannot be copied.
    """
    environment, processes = runner.environment, runner.processes
    if ranks == 1 and processes is None:
        return build_cases(environment, tokenizer, name, first)
    made: Any = None
    is_first, before = PartialState().is_main_process, _pickled_attributes(environment)
    if is_first:
        made = build_cases(environment, tokenizer, name, first), _changed_attributes(environment, before)
        try:
            pickle.dumps(made if ranks > 1 else None)
        except Exception as error:
            raise EnvironmentFailed(
                f"The rows of build_dataset cannot be sent to the other processes: {type(error).__name__}: {error}\n"
                "Keep plain data in them: texts, numbers, lists, dicts."
            ) from error
    built: Datasets
    built, changed = of_first(made)
    for attribute, value in () if is_first else changed.items():
        vars(environment)[attribute] = pickle.loads(value)
    if processes is not None:
        try:
            processes.update(changed)
        except CallFailed as error:
            raise EnvironmentFailed(f"build_dataset set what another process cannot load: {error}") from error
    return built


def _pickled_attributes(environment: object) -> dict[str, bytes | None]:
    """Pickled attributes of the environment, to compare with later ones; None if an attribute cannot be pickled."""
    pickled: dict[str, bytes | None] = {}
    for name, value in getattr(environment, "__dict__", {}).items():
        try:
            pickled[name] = pickle.dumps(value)
        except Exception:
            pickled[name] = None  # a lock, a client, an open file: each process has its own
    return pickled


def _changed_attributes(environment: object, before: Mapping[str, bytes | None]) -> dict[str, bytes]:
    """Pickled attributes that changed since `before`, for the environment in other processes.

    Raises:
        EnvironmentFailed: a new attribute cannot be pickled.
    """
    now = _pickled_attributes(environment)
    lost = [name for name, value in now.items() if value is None and name not in before]
    if lost:
        raise EnvironmentFailed(
            f"build_dataset set self.{lost[0]}, which cannot be copied to the other processes.\n"
            "Set it in __init__, which runs on every process."
        )
    return {name: value for name, value in now.items() if value is not None and value != before.get(name)}
