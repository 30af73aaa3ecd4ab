"""Chats without a model: conversations on a scripted engine, what is shown, and what a chat request takes over."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.environment.session import Message
from aitrain.jobs.chat_models import LoadedChat
from aitrain.jobs.chat_session import ChatSession, Silent
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.engine import Decoding
from aitrain.rollout.limits import Limits
from aitrain.rollout.model_chat import AnswerText, ModelChat, ShownEngine
from aitrain.runs.chat_setup import ChatSetup, chat_options
from aitrain.runs.run_folder import write_json
from aitrain.training.policy_loader import LoadedPolicy
from aitrain.ui.chat_view import ChatView
from tests.conftest import write
from tests.rollout.scripted import END, Letters, Scripted
from tests.screens import Terminal

LONG = "a sentence of twenty-nine abc " * 3


def model_chat(*answers: str, context: int | None = None) -> tuple[ModelChat, Scripted, list[str]]:
    """A chat whose model gives these answers, with its engine and what it shows."""
    left, shown = list(answers), list[str]()
    engine, chat = Scripted(lambda _: left.pop(0)), ChatFormat(Letters())
    answer = AnswerText(chat, shown.append)
    limits = Limits(1, 50, context=context)
    return ModelChat("tuned", "m", ShownEngine(engine, answer), chat, limits, END), engine, shown


def ask(chat: ModelChat, question: str) -> str:
    return asyncio.run(chat.ask(question, 7, Decoding.SEEDED))


# -- conversations


@pytest.mark.parametrize(("context", "word"), [(20, "conversation"), (10, "question")])
def test_a_conversation_that_leaves_no_room_is_refused_and_stays_as_it_was(context: int, word: str) -> None:
    chat, engine, _ = model_chat(context=context)
    before: list[Message] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    chat.messages = list(before) if word == "conversation" else []

    with pytest.raises(ConfigError, match=f"The {word} has"):
        ask(chat, "a question of many letters")

    assert chat.messages == (before if word == "conversation" else [])
    assert engine.requests == []


def test_an_answer_that_does_not_reach_its_end_says_why() -> None:
    chat, _, _ = model_chat("a" * 99, "b" * 99, "c$", context=100)

    ask(chat, "?")
    assert "50 tokens: --rl-max-new-tokens" in chat.cut_off
    ask(chat, "?")
    assert "37 tokens: the context" in chat.cut_off
    chat.messages = []
    ask(chat, "?")
    assert chat.cut_off == ""


# -- two models with weights of their own


def two_models(base: list[str], tuned: list[str], **given: Any) -> tuple[ChatSession, list[Scripted]]:
    """A session with two scripted models, of which each has its own engine, and these engines."""
    chats = [model_chat(*base), model_chat(*tuned)]
    for (chat, _, _), name in zip(chats, ("base", "tuned"), strict=True):
        chat.name = name
    loaded = [LoadedChat(chat, cast(LoadedPolicy, None)) for chat, _, _ in chats]
    return ChatSession(loaded, TrainConfig(), **given), [engine for _, engine, _ in chats]


def prompts_of(engine: Scripted) -> list[str]:
    return ["".join(map(chr, request.prompt_ids)) for request in engine.requests]


def test_two_models_are_asked_the_same_with_the_same_seed_and_each_continues_its_own_answers() -> None:
    session, engines = two_models(["5$", "6$"], ["4$", "5$"], system="add")

    with closing(session):
        assert session.ask("2+2?", Silent()) == {"base": "5$", "tuned": "4$"}
        assert session.ask("+1?", Silent()) == {"base": "6$", "tuned": "5$"}

    assert [prompts_of(engine)[1] for engine in engines] == [
        "s:add$u:2+2?$a:5$u:+1?$a:",
        "s:add$u:2+2?$a:4$u:+1?$a:",
    ]
    base, tuned = ([request.seed for request in engine.requests] for engine in engines)
    assert base == tuned
    assert base[0] != base[1]


def test_a_question_that_one_of_two_models_has_not_answered_is_in_neither_conversation() -> None:
    session, _ = two_models(["a$", "b$"], ["a long answer of thirty letters$", "b$"])
    session.loaded[1].chat.limits = Limits(1, 50, context=45)
    with closing(session):
        session.ask("1?", Silent())
        before = [list(one.chat.messages) for one in session.loaded]
        with pytest.raises(ConfigError):
            session.ask("2?", Silent())

        assert [one.chat.messages for one in session.loaded] == before


# -- what is shown


def view(width: int, *names: str) -> tuple[Terminal, ChatView]:
    terminal = Terminal(width)
    return terminal, ChatView(terminal.console(), {name: f"{name}: model" for name in names})


def test_control_characters_of_a_model_reach_no_terminal() -> None:
    terminal, shown = view(80, "tuned")
    shown.answer("tuned", "a\x1b[2Jb\x07")
    shown.said("tuned", [{"role": "user", "content": "\x1b]0;title\x07"}])
    shown.finish()

    assert terminal.shown[1:] == ["a\\x1b[2Jb\\x07", "user: \\x1b]0;title\\x07"]


# -- the request


def trained(folder: Path, **options: Any) -> str:
    """A run folder with an adapter, as a training leaves it."""
    write(folder / "runs" / "r", {"config.yaml": "\n".join(f"{name}: {value}" for name, value in options.items())})
    model = folder / "runs" / "r" / "model"
    model.mkdir()
    write_json(model / "adapter_config.json", {"base_model_name_or_path": "tiny"})
    (model / "adapter_model.safetensors").write_bytes(b"")
    return "runs/r"


def test_a_chat_takes_over_the_options_of_the_run_and_the_given_ones_win(here: Path) -> None:
    run = trained(here, model="tiny", rl_env="envs.arithmetic", rl_temperature=0.7, rl_top_p=0.9, project_name="r")

    options = chat_options(run, None, {"rl_top_p": 0.5})

    config = ChatSetup(run, options).config
    assert (config.rl_env, config.rl_temperature, config.rl_top_p) == ("envs.arithmetic", 0.7, 0.5)
    assert config.project_name == "project-name"
