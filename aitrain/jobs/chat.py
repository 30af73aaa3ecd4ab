"""The process of `aitrain chat`: `python -m aitrain.jobs.chat FILE`, on the terminal of the command.

FILE holds the request as JSON. Questions are typed, or come line by line from a file or a pipe. A chat has one or two
models, which get the same questions and cases, one after another, with the same seeds.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from aitrain.engines.hf import HFEngine, HFModel
from aitrain.environment.contract import Case, env_kind
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.environment.seeds import derived_seed
from aitrain.environment.session import Message
from aitrain.environment.tool_call_parser import clean
from aitrain.errors import AitrainError, ConfigError, EnvironmentFailed
from aitrain.jobs.env_model import episode_format
from aitrain.jobs.terminal_job import exit_now, run_job
from aitrain.options.train import TrainConfig
from aitrain.redaction import redact
from aitrain.rollout.engine import Decoding
from aitrain.rollout.episode import Episode, Rollout
from aitrain.rollout.event_loop import EventLoop
from aitrain.rollout.limits import Limits
from aitrain.rollout.model_chat import NOT_PART, AnswerText, ChatStoppedError, ModelChat, ShownEngine
from aitrain.runs.chat_setup import ChatSetup
from aitrain.runs.model_reference import ModelReference, before_training, read_model
from aitrain.training.chat_templates import chat_format
from aitrain.training.model import LoadedPolicy, load_policy
from aitrain.ui.chat_view import ChatView, as_text
from aitrain.ui.escape_controls import escape_controls
from aitrain.workbench.episode_view import STOPS, show_heading
from aitrain.workbench.opening import OpenedEnvironment, open_environment
from aitrain.workbench.play import chosen_case

ANSWER_TOKENS = 512
"""Maximum tokens of an answer to a person, unless the user sets it: a run's limit may be that of short answers."""
HELP = """\
/case N       let the models play case N of the environment, with its tools and its score
/system TEXT  begin a new conversation with this system prompt; without TEXT with none
/reset        begin a new conversation
/quit         end, as Ctrl-D does
Ctrl-C interrupts an answer. After a case, the conversation continues from its end."""


# -- the models: one that was trained, and what it was before the training; with LoRA, one set of weights


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
            _loaded("base", before.label, policy, answer_tokens, policy.model.disable_adapter),
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


# -- the conversations


class Listener(Protocol):
    """Gets what is said, as it is said; `name` is the model in whose conversation that is."""

    def answer(self, name: str, text: str) -> None:
        """The text so far of the model's present answer."""
        return

    def said(self, name: str, messages: Sequence[Message]) -> None:
        """The environment's messages after an answer."""
        return


class Silent(Listener):
    """Shows nothing while the answers come."""


@dataclass
class ChatSession:
    """The conversations of a chat; close it at the end."""

    loaded: list[LoadedChat]
    config: TrainConfig
    """The options of cases."""
    seed: int = 0
    decoding: Decoding = Decoding.SEEDED
    system: str = ""
    environment: object = None
    """The environment of cases; None: the options name it."""
    is_stopped: bool = False
    """Whether Ctrl-C was pressed during the last answer."""
    _loop: EventLoop = field(default_factory=EventLoop)
    _asked: int = 0
    _opened: OpenedEnvironment | None = None
    _runner: EnvRunner | None = None

    def __post_init__(self) -> None:
        self.reset()

    @property
    def titles(self) -> dict[str, str]:
        """What each model is, by its name."""
        return {one.chat.name: f"{one.chat.name}: {one.chat.label}" for one in self.loaded}

    def reset(self) -> None:
        """Begin new conversations, with the system prompt if there is one."""
        for chat, _ in self.loaded:
            chat.messages = [{"role": "system", "content": self.system}] if self.system else []

    def ask(self, question: str, listener: Listener) -> dict[str, str]:
        """The answers by the models' names.

        Raises:
            ConfigError: a conversation leaves no room for an answer.
            ChatStoppedError: the person has interrupted; then the question is part of no conversation.
        """
        seed = self._next_seed()
        with self._taken_back_if_stopped():
            answers = {}
            for one in self.loaded:
                with self._heard(one, listener), one.chat.scope():
                    answers[one.chat.name] = self._loop.run(one.chat.ask(question, seed, self.decoding))
            return answers

    def case(self, wanted: str) -> Case:
        """The case of the environment with this number, or this name.

        Raises:
            AitrainError: there is none, or the environment cannot be loaded.
        """
        if self._opened is None:
            tokenizer = self.loaded[0].policy.tokenizer
            self._opened, self.config = open_environment(self.config, tokenizer, self.environment)
        return chosen_case(self._opened.all_cases, wanted)

    def play(self, case: Case, listener: Listener) -> dict[str, Episode]:
        """The episodes of a case, played as in training, by the models' names; the conversations are then theirs.

        Raises:
            AitrainError: a model cannot play the environment.
            ChatStoppedError: the person has interrupted.
        """
        seed = self._next_seed()
        with self._taken_back_if_stopped():
            return {one.chat.name: self._played(one, case, seed, listener) for one in self.loaded}

    def close(self) -> None:
        """Close the environment, and end its threads."""
        if self._runner is not None:
            self._runner.close()
        self._loop.close()

    def _played(self, one: LoadedChat, case: Case, seed: int, listener: Listener) -> Episode:
        assert self._opened is not None  # there is a case
        environment, chat, config = self._opened.environment, one.chat, self.config
        is_chat = case.is_chat or env_kind(environment) == "rollout"
        shown = episode_format(environment, chat.chat, is_chat)
        limits = Limits(
            config.rl_max_turns, config.rl_max_new_tokens, config.rl_max_episode_tokens, chat.limits.context
        )
        if self._runner is None:
            self._runner = start_runner(environment, config)
        self._runner.offer(one.policy.model, one.policy.tokenizer)
        self._runner.on_messages = lambda _, messages: listener.said(chat.name, messages)
        with self._heard(one, listener), chat.scope():
            rollout = Rollout(self._runner, chat.engine, shown, limits, chat.end)
            return self._loop.run(chat.play(rollout, case, self.seed, seed, self.decoding))

    def _next_seed(self) -> int:
        self._asked += 1
        return derived_seed(self.seed, "chat", self._asked)

    @contextmanager
    def _heard(self, one: LoadedChat, listener: Listener) -> Iterator[None]:
        answer = one.chat.engine.answer
        answer.show, answer.is_stopped = (lambda text: listener.answer(one.chat.name, text)), lambda: self.is_stopped
        if self.is_stopped:
            raise ChatStoppedError(NOT_PART)
        yield

    @contextmanager
    def _taken_back_if_stopped(self) -> Iterator[None]:
        """Context in which Ctrl-C ends an answer, and what was said since its beginning is then taken back; a second
        Ctrl-C raises KeyboardInterrupt. Only the main thread gets it."""
        messages = [list(one.chat.messages) for one in self.loaded]
        self.is_stopped = False

        def stop(*_: object) -> None:
            if self.is_stopped:
                raise KeyboardInterrupt
            self.is_stopped = True

        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGINT, stop) if is_main else None
        try:
            yield
        except (ChatStoppedError, ConfigError):
            for one, before in zip(self.loaded, messages, strict=True):
                one.chat.messages = before
            raise
        finally:
            if is_main:
                signal.signal(signal.SIGINT, handler)


def open_session(request: ChatSetup, environment: object = None) -> ChatSession:
    """Load the models of a chat; the options name the environment of its cases, unless an object is given.

    Raises:
        ConfigError: a model cannot be loaded.
    """
    config = request.config
    loaded = load_chats(read_model(request.model), config, request.only, request.answer_tokens)
    decoding = Decoding.GREEDY if request.greedy else Decoding.SEEDED
    return ChatSession(loaded, config, request.seed, decoding, request.system, environment)


def answers_and_scores(episodes: Mapping[str, Episode]) -> tuple[dict[str, str], dict[str, float | None]]:
    """The last answers in episodes and their scores, by the models' names.

    Raises:
        EnvironmentFailed: the environment failed in one of them.
    """
    for message in (episode.failure_message for episode in episodes.values()):
        if message:
            raise EnvironmentFailed(message)
    answers = {}
    for name, episode in episodes.items():
        said = (message for message in reversed(episode.messages) if message["role"] == "assistant")
        answers[name] = str(next(said, {}).get("content", ""))
    return answers, {name: episode.result.score for name, episode in episodes.items()}


# -- on a terminal


class TerminalChat:
    """Reads questions and commands from a terminal, and shows the answers while they come."""

    def __init__(self, session: ChatSession, console: Console) -> None:
        self.session, self.console = session, console
        self.commands = {"case": self.case, "system": self.system, "reset": self.reset, "help": self.help}

    def run(self, first_case: str | None = None) -> int:
        """Answer until /quit or Ctrl-D; returns the exit code."""
        import readline  # noqa: F401  # input() then edits lines and has a history

        for title in self.session.titles.values():
            self._say(title, "bold")
        self._say("/help shows the commands, Ctrl-D ends.")
        if first_case is not None:
            self._do(f"/case {first_case}")
        while True:
            try:
                line = clean(input("> ")).strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends)")
                continue
            if line in ("/quit", "/exit"):
                return 0
            if line:
                self._do(line)

    def _do(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._command(line)
            else:
                self._ask(line)
        except AitrainError as error:
            self._say(str(error), "red")
        except KeyboardInterrupt:
            if self.session.is_stopped:  # the second one during an answer
                raise
            self._say("\n(Ctrl-D ends)")  # the answer was complete, and was being printed

    def _command(self, line: str) -> None:
        word, _, rest = line[1:].partition(" ")
        if word not in self.commands:
            self._say(f"there is no command /{word}", "red")
            self.help("")
            return
        self.commands[word](rest.strip())

    def _ask(self, question: str) -> None:
        view = ChatView(self.console, self.session.titles)
        with _shown(view):
            self.session.ask(question, view)
            for chat, _ in self.session.loaded:
                if chat.cut_off:
                    view.note(chat.name, chat.cut_off, "yellow")

    def case(self, wanted: str) -> None:
        """Play a case, and show the scores."""
        if not wanted:
            raise ConfigError("/case N: give the number of the case's row, or its case_idx")
        case = self.session.case(wanted)
        show_heading(self.console, f"case {case.number}")
        asked = case.prompt if isinstance(case.prompt, list) else [{"role": "prompt", "content": case.prompt}]
        for message in asked:
            self.console.print(as_text(message), soft_wrap=True)
        view = ChatView(self.console, self.session.titles)
        with _shown(view):
            for name, episode in self.session.play(case, view).items():
                for text, style in outcome(episode):
                    view.note(name, text, style)

    def system(self, text: str) -> None:
        """Set the system prompt, and begin a new conversation."""
        self.session.system = text
        self.reset("")

    def reset(self, _: str) -> None:
        """Begin a new conversation."""
        self.session.reset()
        self._say("new conversation" + (f" with the system prompt: {self.session.system}" * bool(self.session.system)))

    def help(self, _: str) -> None:
        """Show the commands."""
        self._say(HELP)

    def _say(self, text: str, style: str = "dim") -> None:
        self.console.print(Text(escape_controls(redact(text)), style), soft_wrap=True)


@contextmanager
def _shown(view: ChatView) -> Iterator[None]:
    """Show what is said in the context, also after Ctrl-C."""
    is_stopped = False
    try:
        yield
    except ChatStoppedError:
        is_stopped = True
    finally:
        view.finish()
    if is_stopped:
        view.console.print(Text(NOT_PART, "yellow"))


def outcome(episode: Episode) -> Iterator[tuple[str, str]]:
    """Score, metrics and end of an episode, as lines with their styles."""
    if episode.failure_message:
        yield episode.failure_message, "red"
        return
    score = episode.result.score
    if score is None:
        yield "score none: unscored", "yellow"
    else:
        yield f"score {score:.3f}", "bold green" if score > 0.8 else "bold red" if score < 0.2 else "bold yellow"
    for name, value in episode.result.metrics.items():
        yield f"      env/{name} {value:g}", "dim"
    turns = len(episode.trajectory.turns)
    yield f"{STOPS.get(episode.stop, episode.stop)} ({turns} turn{'' if turns == 1 else 's'})", "dim"


# -- from a file or a pipe


def answer_lines(session: ChatSession, case: str | None, as_json: bool) -> int:
    """Answer each line of the standard input by itself, one line each; the answers of two models have their names and a
    tab between them. A case is played first."""
    if case is not None:
        answers, scores = answers_and_scores(session.play(session.case(case), Silent()))
        _print_line({"case": case, "answers": answers, "scores": scores}, as_json)
    for number, line in enumerate(sys.stdin, 1):
        question = clean(line).strip()
        if question:
            session.reset()
            try:
                answers = session.ask(question, Silent())
            except ConfigError as error:
                raise ConfigError(f"line {number}: {error}") from None
            _print_line({"question": question, "answers": answers}, as_json)
    return 0


def _print_line(values: dict[str, Any], as_json: bool) -> None:
    answers: dict[str, str] = values["answers"]
    shown = []
    for name, answer in answers.items():
        one_line = answer.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
        shown.append((f"{name}: " if len(answers) > 1 else "") + escape_controls(one_line))
    print(json.dumps(values) if as_json else "\t".join(shown), flush=True)


def main(request: ChatSetup) -> int:
    """Chat until the input ends; returns the exit code."""
    transformers_logging.set_verbosity_error()

    def work() -> int:
        is_typed = sys.stdin.isatty()
        if is_typed:
            print("loading the model ...", file=sys.stderr)
        with closing(open_session(request)) as session:
            try:
                if is_typed:
                    return TerminalChat(session, Console(highlight=False)).run(request.case)
                return answer_lines(session, request.case, request.as_json)
            except ChatStoppedError:
                raise KeyboardInterrupt from None

    return run_job(work, request.as_json, "chat")


if __name__ == "__main__":
    exit_now(main(ChatSetup(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
