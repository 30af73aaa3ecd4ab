"""A policy that asks a person at the terminal for each answer."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass

from aitrain.environment.session import AssistantTurn
from aitrain.environment.tool_call_parser import clean
from aitrain.workbench.episode_view import signature
from aitrain.workbench.player import Conversation

QUOTES = '"""'
"""A line that begins and ends an answer with empty lines in it."""
HINT = f"Type the answer; an empty line ends it. Put {QUOTES} around one with empty lines.\nCtrl-D ends the episode."
TOOL_HINT = "Call a tool with: tool NAME key=value (values are JSON, else text). Tools:"


@dataclass
class Person:
    """Reads answers line by line; the end of the input ends the episode."""

    say: Callable[[str], None]
    """Shows a hint or a problem."""
    has_hinted: bool = False

    def __call__(self, conversation: Conversation) -> AssistantTurn | None:
        """The next answer."""
        if not self.has_hinted and sys.stdin.isatty():
            import readline  # noqa: F401  # input() then edits lines and has a history

            self.say(HINT)
            if conversation.reset.runs_tools:
                self.say("\n  ".join([TOOL_HINT, *map(signature, conversation.reset.tools)]))
            self.has_hinted = True
        while True:
            typed = read_answer()
            if typed is None:
                return None
            try:
                return conversation.turn(written(typed) if conversation.reset.runs_tools else typed)
            except ValueError as problem:
                self.say(str(problem))


def read_answer() -> str | None:
    """Lines up to an empty one, or all lines between two lines of quotes; None at the end of the input."""
    lines: list[str] = []
    end = ""
    while True:
        line = _read_line("> " if not lines and not end else ". ")
        if line is None:
            return "\n".join(lines) if lines else None
        if not end and not lines and line.strip() == QUOTES:
            end = QUOTES
        elif line.strip() == end:
            return "\n".join(lines)
        else:
            lines.append(line)


def _read_line(prompt: str) -> str | None:
    try:
        return clean(input(prompt if sys.stdin.isatty() else ""))
    except EOFError:
        if sys.stdin.isatty():
            print()  # Ctrl-D leaves the cursor behind the prompt
        return None


def written(typed: str) -> str:
    """The answer as a model writes it: `tool NAME key=value` lines and JSON calls become <tool_call> blocks.

    Raises:
        ValueError: a call cannot be read; the text says why.
    """
    stripped = typed.strip()
    if stripped.startswith("{"):
        try:
            value = json.loads(stripped)
        except ValueError:
            return typed
        return _call(value) if isinstance(value, dict) and "name" in value else typed
    return "\n".join(_call(_command(line)) if line.split()[:1] == ["tool"] else line for line in typed.split("\n"))


def _call(call: dict[str, object]) -> str:
    return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


def _command(line: str) -> dict[str, object]:
    try:
        words = shlex.split(line)[1:]
    except ValueError as error:
        raise ValueError(f"{line}: {error}") from None
    pairs = [word.partition("=") for word in words[1:]]
    if not words or not all(name and equals for name, equals, _ in pairs):
        raise ValueError(f"{line}: write tool NAME key=value key=value")
    return {"name": words[0], "arguments": {name: _value(value) for name, _, value in pairs}}


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
