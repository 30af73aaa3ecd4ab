"""Conversations with one or two models, which get the same questions with the same seeds, and the process of `aitrain
chat`, on the terminal of the command, started as ui/output.py says.
"""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from aitrain.environment.completion_parser import clean
from aitrain.environment.seeds import SampleSeed, derived_seed
from aitrain.environment.session import Message
from aitrain.errors import AitrainError, ConfigError
from aitrain.redaction import redact
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.engine import Decoding, Engine, GenerationRequest, Trajectory
from aitrain.rollout.episode import sample_turn
from aitrain.rollout.event_loop import EventLoop, event_loop
from aitrain.runs.model_reference import before_training, chat_config, read_model
from aitrain.training.chat_templates import chat_format
from aitrain.training.loaded_policy import load_policy
from aitrain.ui.output import escape_controls, run_job
from aitrain.ui.terminal import ChatView

HELP = """\
/system TEXT  begin a new conversation with this system prompt; without TEXT with none
/reset        begin a new conversation
/quit         end, as Ctrl-D does
Ctrl-C interrupts an answer."""


@dataclass
class ModelChat:
    """One model in a chat, and its messages so far. Its answers are shown while they are sampled."""

    name: str
    """`base`, `tuned` or `model`."""
    title: str
    """The name with which model it is."""
    engine: Engine
    chat: ChatFormat
    max_tokens: int
    """Maximum tokens of an answer."""
    context: int | None
    """Maximum tokens of conversation and answer together."""
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context in which the engine has the weights of this model, such as a base without the adapter beside it."""
    has_template: bool = True
    """Whether conversations are rendered by a chat template; if not, the model continues the plain text."""
    messages: list[Message] = field(default_factory=list)
    cut_off: str = ""
    """Why the last answer ends before its end, and what to do; empty if the model ended it."""
    show: Callable[[str], None] = lambda _: None
    """Called with the whole answer so far."""
    ids: list[int] = field(default_factory=list)
    """The tokens of the answer so far."""

    @property
    def text(self) -> str:
        """The answer so far, without special tokens."""
        return str(self.chat.tokenizer.decode(self.ids, skip_special_tokens=True))

    def on_tokens(self, tokens: list[int]) -> None:
        """Take the newest token of each row, of which there is one. Ends the generation if Ctrl-C has cancelled it."""
        self.ids += tokens[:1]
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise asyncio.CancelledError
        self.show(self.text.rstrip("\ufffd"))  # the rest of a character may come with the next token

    async def ask(self, question: str, seed: int, decoding: Decoding) -> list[Message]:
        """The conversation with a question of the person and the model's answer.

        Raises:
            ConfigError: the conversation leaves no room for an answer.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        text = "".join(str(message["content"]) for message in asked)
        ids = self.chat.prompt_ids(asked if self.has_template else text)
        room = self.max_tokens if self.context is None else min(self.max_tokens, self.context - len(ids))
        if room < 1:
            raise ConfigError(
                f"The conversation has {len(ids)} of {self.context} tokens: there is no room for an answer.\n"
                "Begin a new one: /reset, or reset() in Python."
            )
        said, self.ids = Trajectory(ids), []
        request = GenerationRequest([], room, SampleSeed(seed), decoding)
        # in no batch, so that the next one continues it
        turn = await sample_turn(self.engine, self.chat, said, request)
        self.ids = said.ids
        self.show(self.text)  # what was not shown while it was sampled
        self.cut_off = ""
        if not said.ended_by_policy:
            advice = "--rl-max-new-tokens allows more" if room == self.max_tokens else "the context is full"
            self.cut_off = f"cut off after {len(said.ids)} tokens: {advice}"
        return [*asked, turn.message]


@dataclass
class ChatSession:
    """The conversations of a chat; close it at the end."""

    chats: list[ModelChat]
    seed: int = 0
    decoding: Decoding = Decoding.SEEDED
    system: str = ""
    _loop: EventLoop = field(default_factory=event_loop)
    _asked: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self, system: str | None = None) -> None:
        """Begin new conversations, with another system prompt if one is given; an empty one is none."""
        self.system = self.system if system is None else system
        for chat in self.chats:
            chat.messages = [{"role": "system", "content": self.system}] if self.system else []

    def __call__(self, question: str, show: Callable[[str, str], None] = lambda *_: None) -> dict[str, str]:
        """The answers by the models' names; `show` gets a name and the answer so far, while it comes. After Ctrl-C, or
        where an answer cannot be had, the question is part of no conversation.

        Raises:
            ConfigError: a conversation leaves no room for an answer.
        """
        self._asked += 1
        seed, said = derived_seed(self.seed, "chat", self._asked), list[list[Message]]()
        for chat in self.chats:
            chat.show = partial(show, chat.name)
            with chat.scope():
                said.append(self._loop.run(chat.ask(question, seed, self.decoding)))
        for chat, messages in zip(self.chats, said, strict=True):
            chat.messages = messages
        return {chat.name: chat.text for chat in self.chats}

    def close(self) -> None:
        """End its thread."""
        self._loop.close()


def open_session(
    model: str,
    given: Mapping[str, object],
    only: str | None = None,
    system: str = "",
    greedy: bool = False,
    seed: int = 0,
) -> ChatSession:
    """Load the models of a chat: one that was trained, and what it was before the training, or `only` one of them; with
    LoRA, they are one set of weights. The sampling options are those of the run, where they are not `given`.

    Raises:
        ConfigError: a model cannot be loaded, or an option is wrong.
    """
    wanted, reference = chat_config(model, given), read_model(model)
    before = before_training(reference)
    named = {"model": reference} if before is None else {"base": before, "tuned": reference}
    if only not in (None, *named):
        raise ConfigError(f"only: {model} has no {only}, but {' and '.join(named)}")
    is_one_model = (
        before is not None and reference.adapter is not None and (before.adapter, before.base) == (None, reference.base)
    )
    chats, policy = list[ModelChat](), None
    for name, each in named.items():
        if only not in (None, name):
            continue
        title = f"{name}: {each.label}" + ("" if each.step is None else f", step {each.step}")
        if policy is None or not is_one_model:
            policy = load_policy(reference if is_one_model else each, wanted)
        config, engine = policy.config, policy.engine()
        own_format, most = chat_format(policy.tokenizer, config), config.completion_tokens
        chat = ModelChat(name, title, engine, own_format, most, policy.context)
        chat.has_template = policy.tokenizer.chat_template is not None
        if is_one_model and name == "base":
            chat.scope = policy.model.disable_adapter
        engine.on_tokens = chat.on_tokens
        chats.append(chat)
    return ChatSession(chats, seed, Decoding.GREEDY if greedy else Decoding.SEEDED, system)


# -- in the terminal


def talk(session: ChatSession, console: Console) -> None:
    """Answer what a person types until /quit or Ctrl-D."""
    import readline  # noqa: F401  # input() then edits lines and has a history

    def say(text: str, style: str = "dim") -> None:
        console.print(Text(escape_controls(redact(text)), style), soft_wrap=True)

    for chat in session.chats:
        say(chat.title, "bold")
    say("/help shows the commands, Ctrl-D ends.")
    while True:
        try:
            line = clean(input("> ")).strip()
            word, _, rest = line.partition(" ")
            if word == "/quit":
                return
            if word in ("/system", "/reset"):
                session.reset(rest.strip() if word == "/system" else None)
                prompt = session.system and f" with the system prompt: {session.system}"
                say(f"new conversation{prompt}")
            elif line.startswith("/"):
                say(HELP)
            elif line:
                show_answers(session, console, line)
        except EOFError:
            print()
            return
        except AitrainError as error:
            say(str(error), "red")
        except KeyboardInterrupt:
            print("\n(Ctrl-D ends)")


def show_answers(session: ChatSession, console: Console, question: str) -> None:
    """Show the answers to a question while they come, also what was answered before Ctrl-C."""
    view = ChatView(console, {chat.name: chat.title for chat in session.chats})
    try:
        try:
            session(question, view.answer)
        except KeyboardInterrupt:
            view.write(f"\n{session.chats[-1].name}: interrupted: this is not part of the conversation", "yellow")
            return
        for chat in session.chats:
            if chat.cut_off:
                view.write(f"\n{chat.name}: {chat.cut_off}", "yellow")
    finally:
        view.write("\n")


def answer_lines(session: ChatSession) -> None:
    """Answer each line of the standard input by itself, one line of JSON each."""
    for line in sys.stdin:
        if question := clean(line).strip():
            session.reset()
            print(json.dumps({"question": question, "answers": session(question)}), flush=True)


def main(request: dict[str, Any]) -> int:
    """Chat until the input ends; returns the exit code."""
    transformers_logging.set_verbosity_error()
    is_typed = sys.stdin.isatty()

    def work() -> None:
        if is_typed:
            print("loading the model ...", file=sys.stderr)
        with closing(open_session(**request)) as session:
            if is_typed:
                talk(session, Console(highlight=False))
            else:
                answer_lines(session)

    return run_job(work, not is_typed, "chat")
