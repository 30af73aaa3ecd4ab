"""The process of `aitrain chat`: `python -m aitrain.jobs.chat FILE`, on the terminal of the command.

FILE holds the request as JSON. Questions are typed, or come line by line from a file or a pipe.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from aitrain.environment.contract import Case
from aitrain.environment.session import Message
from aitrain.environment.tool_call_parser import clean
from aitrain.errors import AitrainError, ConfigError, Interrupted, RunFailed
from aitrain.jobs.chat_session import ChatSession, Silent, answers_and_scores, open_session
from aitrain.jobs.env_terminal import exit_now
from aitrain.redaction import redact
from aitrain.rollout.episode import Episode
from aitrain.rollout.model_chat import NOT_PART, ChatStoppedError
from aitrain.runs.chat_setup import ChatSetup
from aitrain.ui.chat_view import ChatView, as_text
from aitrain.ui.error_line import show_error
from aitrain.ui.escape_controls import escape_controls
from aitrain.workbench.episode_view import STOPS, show_heading

HELP = """\
/case N       let the models play case N of the environment, with its tools and its score
/system TEXT  begin a new conversation with this system prompt; without TEXT with none
/reset        begin a new conversation
/quit         end, as Ctrl-D does
Ctrl-C interrupts an answer. After a case, the conversation continues from its end."""


def main(request: ChatSetup) -> int:
    """Chat until the input ends; returns the exit code."""
    transformers_logging.set_verbosity_error()
    try:
        is_typed = sys.stdin.isatty()
        if is_typed:
            print("loading the model ...", file=sys.stderr)
        with closing(open_session(request)) as session:
            if is_typed:
                return TerminalChat(session, Console(highlight=False)).run(request.case)
            return answer_lines(session, request.case, request.as_json)
    except (KeyboardInterrupt, ChatStoppedError):
        print()
        return Interrupted.exit_code
    except AitrainError as error:
        return show_error(str(error), error.exit_code, request.as_json)
    except BrokenPipeError:  # `aitrain chat runs/sums < questions | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return RunFailed.exit_code
    except Exception as error:
        what = " ".join(str(error).split())[:300]
        return show_error(f"The chat failed: {type(error).__name__}: {what}", RunFailed.exit_code, request.as_json)


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
            if self.session.stop.is_set:  # the second one during an answer
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
        for message in messages_of(case):
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
    try:
        yield
    except ChatStoppedError:
        view.finish()
        view.console.print(Text(NOT_PART, "yellow"))
    except BaseException:
        view.finish()
        raise
    else:
        view.finish()


def messages_of(case: Case) -> list[Message]:
    """The case's prompt as messages."""
    return case.prompt if isinstance(case.prompt, list) else [{"role": "prompt", "content": case.prompt}]


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


if __name__ == "__main__":
    exit_now(main(ChatSetup(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
