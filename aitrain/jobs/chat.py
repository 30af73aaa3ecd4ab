"""The process of `aitrain chat`: `python -m aitrain.jobs.chat FILE`, on the terminal of the command.

FILE holds the request as JSON. Questions are typed, or come line by line from a file or a pipe.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from aitrain.environment.tool_call_parser import clean
from aitrain.errors import AitrainError, ConfigError
from aitrain.jobs.chat_session import NOT_PART, ChatSession, ChatStoppedError, open_session
from aitrain.jobs.terminal_job import exit_now, run_job
from aitrain.redaction import redact
from aitrain.runs.chat_setup import ChatSetup
from aitrain.ui.chat_view import ChatView
from aitrain.ui.escape_controls import escape_controls

HELP = """\
/system TEXT  begin a new conversation with this system prompt; without TEXT with none
/reset        begin a new conversation
/quit         end, as Ctrl-D does
Ctrl-C interrupts an answer."""


class TerminalChat:
    """Reads questions and commands from a terminal, and shows the answers while they come."""

    def __init__(self, session: ChatSession, console: Console) -> None:
        self.session, self.console = session, console

    def run(self) -> int:
        """Answer until /quit or Ctrl-D; returns the exit code."""
        import readline  # noqa: F401  # input() then edits lines and has a history

        for title in self.session.titles.values():
            self._say(title, "bold")
        self._say("/help shows the commands, Ctrl-D ends.")
        line = ""
        while line not in ("/quit", "/exit"):
            try:
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._ask(line)
            except AitrainError as error:
                self._say(str(error), "red")
            except KeyboardInterrupt:
                if self.session.is_stopped:  # the second one during an answer
                    raise
                self._say("\n(Ctrl-D ends)")  # the answer was complete, and was being printed
            try:
                line = clean(input("> ")).strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends)")
                line = ""
        return 0

    def _command(self, line: str) -> None:
        word, _, rest = line[1:].partition(" ")
        if word in ("system", "reset"):
            if word == "system":
                self.session.system = rest.strip()
            self.session.reset()
            prompt = self.session.system and f" with the system prompt: {self.session.system}"
            self._say(f"new conversation{prompt}")
        else:
            if word != "help":
                self._say(f"there is no command /{word}", "red")
            self._say(HELP)

    def _ask(self, question: str) -> None:
        with self._view() as view:
            self.session.ask(question, view)
            for chat in self.session.chats:
                if chat.cut_off:
                    view.note(chat.name, chat.cut_off, "yellow")

    @contextmanager
    def _view(self) -> Iterator[ChatView]:
        """Where the answers are shown, also after Ctrl-C."""
        view, interrupted = ChatView(self.console, self.session.titles), ""
        try:
            yield view
        except ChatStoppedError:
            interrupted = NOT_PART
        finally:
            view.finish()
        if interrupted:
            self._say(interrupted, "yellow")

    def _say(self, text: str, style: str = "dim") -> None:
        self.console.print(Text(escape_controls(redact(text)), style), soft_wrap=True)


def answer_lines(session: ChatSession, as_json: bool) -> int:
    """Answer each line of the standard input by itself, one line each; the answers of two models have their names and a
    tab between them."""
    for number, line in enumerate(sys.stdin, 1):
        question = clean(line).strip()
        if question:
            session.reset()
            try:
                answers = session.ask(question)
            except ConfigError as error:
                raise ConfigError(f"line {number}: {error}") from None
            shown = []
            for name, answer in answers.items():
                one_line = answer.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
                shown.append((f"{name}: " if len(answers) > 1 else "") + escape_controls(one_line))
            line_of_json = json.dumps({"question": question, "answers": answers})
            print(line_of_json if as_json else "\t".join(shown), flush=True)
    return 0


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
                    return TerminalChat(session, Console(highlight=False)).run()
                return answer_lines(session, request.as_json)
            except ChatStoppedError:
                raise KeyboardInterrupt from None

    return run_job(work, request.as_json, "chat")


if __name__ == "__main__":
    exit_now(main(ChatSetup(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
