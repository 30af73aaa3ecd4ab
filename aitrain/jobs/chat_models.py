"""The models of a chat: one that was trained, and what it was before the training; with LoRA, one set of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from aitrain.engines.hf import HFEngine, HFModel
from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.rollout.model_chat import AnswerText, ModelChat, ShownEngine
from aitrain.runs.model_reference import ModelReference, before_training
from aitrain.training.chat_templates import chat_format
from aitrain.training.model import LoadedPolicy, load_policy

ANSWER_TOKENS = 512
"""Maximum tokens of an answer to a person, unless the user sets it: a run's limit may be that of short answers."""


class LoadedChat(NamedTuple):
    """A model to talk to, and its weights."""

    chat: ModelChat
    policy: LoadedPolicy


def load_chats(
    reference: ModelReference, config: TrainConfig, only: str | None, answer_tokens: int | None = None
) -> list[LoadedChat]:
    """The models to talk to, base first; `only` is `base` or `tuned`, None for both.

    Raises:
        ConfigError: a model cannot be loaded, or the base is not known.
    """
    before, wanted = before_training(reference), {"base", "tuned"} if only is None else {only}
    label = reference.label if reference.step is None else f"{reference.label}, step {reference.step}"
    if before is None:
        if only == "base":
            raise ConfigError(f"only: it is not known what {reference.given} was trained from")
        return [_loaded("model", label, load_policy(reference, config), answer_tokens)]
    is_one_model = reference.adapter is not None and before.adapter is None and before.base == reference.base
    if is_one_model:
        policy = load_policy(reference, config)
        both = [
            _loaded("base", before.label, policy, answer_tokens, partial(_without_adapter, policy)),
            _loaded("tuned", label, policy, answer_tokens),
        ]
        return [each for each in both if each.chat.name in wanted]
    named = [("base", before.label, before), ("tuned", label, reference)]
    return [_loaded(name, what, load_policy(one, config), answer_tokens) for name, what, one in named if name in wanted]


def _loaded(
    name: str,
    label: str,
    policy: LoadedPolicy,
    answer_tokens: int | None,
    scope: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> LoadedChat:
    chat = chat_format(policy.tokenizer, policy.config.trl_table("chat_template_kwargs"))
    answer = AnswerText(chat)
    model = HFModel(policy.model, policy.tokenizer, on_tokens=answer.on_tokens)
    engine = ShownEngine(HFEngine(model, policy.sampling, policy.end, policy.context), answer)
    limits = replace(policy.limits, turn_tokens=answer_tokens or ANSWER_TOKENS, episode_tokens=None)
    has_template = policy.tokenizer.chat_template is not None
    return LoadedChat(ModelChat(name, label, engine, chat, limits, policy.end, has_template, scope), policy)


@contextmanager
def _without_adapter(policy: LoadedPolicy) -> Iterator[None]:
    with policy.model.disable_adapter():
        yield
