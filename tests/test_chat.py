"""Chats without a model: conversations on a scripted engine, what is shown, and what a chat request takes over."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from aitrain import ConfigError
from aitrain.environment.completion_parser import THINK
from aitrain.jobs.chat import ChatSession, ModelChat
from aitrain.options.yaml_text import write_yaml
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.engine import Completion, Decoding, GenerationRequest
from aitrain.runs.model_reference import chat_config
from aitrain.ui.terminal import ChatView
from tests.conftest import write
from tests.rollout.scripted import Letters, Scripted
from tests.screens import Terminal

LONG = "a sentence of twenty-nine abc " * 3


def model_chat(*answers: str, context: int | None = None) -> tuple[ModelChat, Scripted, list[str]]:
    """A chat whose model gives these answers, with its engine and what it shows."""
    left, shown = list(answers), list[str]()
    engine, chat = Scripted(lambda _: left.pop(0)), ChatFormat(Letters())
    return ModelChat("tuned", "m", engine, chat, 50, context, show=shown.append), engine, shown


def ask(chat: ModelChat, question: str) -> str:
    chat.messages = asyncio.run(chat.ask(question, 7, Decoding.SEEDED))
    return chat.text


def test_an_answer_that_does_not_reach_its_end_says_why() -> None:
    chat, _, _ = model_chat("a" * 99, "b" * 99, "c$", context=100)

    ask(chat, "?")
    assert "50 tokens: --rl-max-new-tokens" in chat.cut_off
    ask(chat, "?")
    assert "37 tokens: the context" in chat.cut_off
    chat.messages = []
    ask(chat, "?")
    assert chat.cut_off == ""


def test_a_thought_that_is_ended_is_shown_with_its_answer_and_kept_apart_in_the_conversation() -> None:
    chat, _, shown = model_chat("<think>two and two", "4$")
    chat.chat = ChatFormat(Letters(), thoughts=THINK, thinking=12)

    assert ask(chat, "2 + 2") == shown[-1] == "<think>two a\n</think>\n\n4$"
    assert shown[-1].startswith(shown[0])
    assert chat.messages[-1] == {"role": "assistant", "content": "4", "reasoning_content": "two a"}


def test_two_models_are_asked_the_same_and_an_answer_that_one_of_them_cannot_give_is_in_neither_conversation() -> None:
    chats = [model_chat("5$", "6$", "7$"), model_chat("4$", "5$")]
    for (chat, _, _), name in zip(chats, ("base", "tuned"), strict=True):
        chat.name = name
    loaded = [chat for chat, _, _ in chats]
    with closing(ChatSession(loaded, system="add")) as session:
        assert session("2+2?") == {"base": "5$", "tuned": "4$"}
        assert session("+1?") == {"base": "6$", "tuned": "5$"}
        (_, base), (first, tuned) = (engine.requests for _, engine, _ in chats)
        assert "".join(map(chr, base.prompt_ids)) == "s:add$u:2+2?$a:5$u:+1?$a:"
        assert "".join(map(chr, tuned.prompt_ids)) == "s:add$u:2+2?$a:4$u:+1?$a:"
        assert base.seed == tuned.seed != first.seed

        before = [list(chat.messages) for chat in loaded]
        loaded[1].context = 20
        with pytest.raises(ConfigError, match="The conversation has"):
            session("+2?")
        assert [chat.messages for chat in loaded] == before


def test_ctrl_c_ends_an_answer_which_is_in_no_conversation() -> None:
    chats = [model_chat("4$", "5$"), model_chat("4$", "5$")]
    generate = chats[1][1].generate

    async def interrupted(request: GenerationRequest) -> Completion:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        return await generate(request)

    with closing(ChatSession([chat for chat, _, _ in chats], system="add")) as session:
        chats[1][1].generate = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            session("2+2?")
        assert [len(chat.messages) for chat, _, _ in chats] == [1, 1]
        chats[1][1].generate = generate  # type: ignore[method-assign]
        assert set(session("2+3?")) == {"tuned"}


def test_control_characters_of_a_model_reach_no_terminal() -> None:
    terminal = Terminal(80)
    shown = ChatView(terminal.console(), {"tuned": "tuned: model"})
    shown.answer("tuned", "a\x1b[2J")
    shown.answer("tuned", "a\x1b[2Jb\x07")
    shown.write("\ntuned: \x1b]0;title\x07\n", "red")

    assert terminal.shown[1:] == ["a\\x1b[2Jb\\x07", "tuned: \\x1b]0;title\\x07"]


def test_a_chat_takes_over_the_options_of_the_run_and_the_given_ones_win(here: Path) -> None:
    options = {
        "model": "tiny",
        "rl_env": "envs.arithmetic",
        "rl_temperature": 0.7,
        "rl_top_p": 0.9,
        "rl_max_new_tokens": 99,
        "project_name": "r",
    }
    adapter = json.dumps({"base_model_name_or_path": "tiny"})
    write(here / "runs/r", {"config.yaml": write_yaml(options), "model/adapter_config.json": adapter})
    write(here / "runs/r", {"model/adapter_model.safetensors": ""})

    config = chat_config("runs/r", {"rl_top_p": 0.5, "thinking": "20"})

    assert (config.rl_env, config.rl_temperature, config.rl_top_p) == ("envs.arithmetic", 0.7, 0.5)
    assert config.completion_tokens == 512 + 20 + 16  # of a chat, with room for the thought and its end
    assert config.project_name == "project-name"


def test_ctrl_c_while_the_process_of_a_command_imports_its_libraries_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    code = "from aitrain.launch.command_processes import *; run_on_terminal('slow', {})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "\naitrain: stopped\n")
