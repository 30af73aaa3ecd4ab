"""Shows episodes and cases in the terminal, as the model gets them; text of models and environments is escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.console import Console
from rich.text import Text

from aitrain.environment.contract import Case, ScoreResult
from aitrain.environment.session import AssistantTurn, Message, ResetResult, UntrainedChat
from aitrain.environment.tool_call_parser import ToolJson
from aitrain.ui.escape_controls import escape_controls
from aitrain.workbench.model_view import ModelView, RenderedText
from aitrain.workbench.stage import StagedEpisode

WIDTH = 80
SPECIAL_TOKEN = r"<\|[^|<>\s]{1,40}\|>|</?s>|<(start|end)_of_turn>"
LONGEST_VALUE = 300
"""Maximum characters of a column's value."""
STOPS = {
    "done": "the environment ended the episode",
    "max_tokens": "the environment ended the episode, its last answer was cut off",
    "max_turns": "the limit of turns ended the episode",
    "truncated": "no room for another answer",
    "no_room": "the prompt leaves no room for an answer",
    "out_of_replies": "there is no further answer",
}
"""Why an episode ended, in words."""


@dataclass
class EpisodeView:
    """Shows an episode while it is played."""

    console: Console
    view: ModelView
    who: str
    """The policy, for headings."""
    is_typed: bool = False
    """Whether the answers appear by being typed."""
    _is_chat: bool = True
    _turns: int = 0

    def opened(self, reset: ResetResult) -> None:
        """Show the conversation before the first answer."""
        prompt = reset.prompt or []
        self._is_chat = not isinstance(prompt, str)
        self._show(self.view.prompt(prompt, reset.tools))

    def answered(self, turn: AssistantTurn) -> None:
        """Show the answer, and the calls that were read from it."""
        if not self.is_typed:
            self.heading(f"{self.who} answers")
            if turn.text or not turn.calls:
                self.text(turn.text, "cyan")
        for call in turn.calls:
            arguments = json.dumps(call.arguments, ensure_ascii=False)
            self.text(f"-> {call.name} {call.problem or arguments}", "yellow" if call.problem else "cyan")

    def heard(self, messages: Sequence[Message]) -> None:
        """Show what the environment says, with the end of the last turn and the start of the next one."""
        self._show(self.view.following(messages, self._is_chat))

    def asked_beside(self, chat: UntrainedChat) -> None:
        """Show a conversation that is not trained."""
        self.heading("the environment asks in another conversation, which is not trained")
        self.text(self.view.prompt(list(chat.messages), chat.tools).text)

    def ended(self, episode: StagedEpisode) -> None:
        """Show why the episode ended, its score and its metrics."""
        last = episode.conversation.messages[-1:]
        if episode.stop == "done" and last and last[0]["role"] != "assistant":
            self.heading("the environment says")
            self.text(str(last[0]["content"]))
        show_ended(self.console, episode.stop, episode.turns, episode.result)

    def heading(self, text: str) -> None:
        """A line that separates pieces."""
        show_heading(self.console, text)

    def text(self, text: str, style: str = "") -> None:
        """Text of the model or the environment, escaped."""
        show_text(self.console, text, style)

    def _show(self, rendered: RenderedText) -> None:
        self._turns += 1
        what = "the model gets" if self._turns == 1 else "the model then gets"
        self.heading(f"turn {self._turns}: {what} {rendered.tokens} tokens")
        self.text(rendered.text)


def show_ended(console: Console, stop: str, turns: int, result: ScoreResult) -> None:
    """Why an episode ended, and its score."""
    show_heading(console, f"{STOPS[stop]} ({stop}, {turns} turn{'' if turns == 1 else 's'})")
    show_score(console, result.score, result.metrics)


def show_heading(console: Console, text: str) -> None:
    """`-- text ----------`, as wide as the terminal, at most 80 columns."""
    line = f"-- {escape_controls(text)} "
    console.print(Text(line.ljust(min(WIDTH, console.width), "-"), style="bold"), soft_wrap=True)


def show_text(console: Console, text: str, style: str = "") -> None:
    """Escaped text with dim special tokens; a line end at its end is that of the line."""
    shown = Text(escape_controls(text.removesuffix("\n")), style=style)
    shown.highlight_regex(SPECIAL_TOKEN, "dim")
    console.print(shown, soft_wrap=True)


def show_score(console: Console, score: float | None, metrics: Mapping[str, float]) -> None:
    """The score and the metrics, one a line."""
    if score is None:
        console.print(Text("score none: unscored, left out of training", style="yellow"))
    else:
        colour = "green" if score > 0.8 else "red" if score < 0.2 else "yellow"
        console.print(Text(f"score {score:.3f}", style=f"bold {colour}"))
    for name, value in metrics.items():
        console.print(Text(f"      env/{escape_controls(name)} {value:g}", style="dim"), soft_wrap=True)


def show_columns(console: Console, case: Case) -> None:
    """The columns of a case's row, without the prompt."""
    for name, value in case.row.items():
        if name != "prompt":
            text = shortened(value if isinstance(value, str) else repr(value))
            show_text(console, f"{name}: {text}", "dim")


def shortened(text: str) -> str:
    """At most LONGEST_VALUE characters."""
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text):,} characters)"


def signature(schema: ToolJson) -> str:
    """A tool's schema as a call: `add(first: integer, second: integer)`; optional arguments end with `?`."""
    function = schema.get("function", schema)
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or ()
    arguments = (
        f"{name}{'' if name in required else '?'}" + (f": {kind}" if isinstance(kind := each.get("type"), str) else "")
        for name, each in islice((parameters.get("properties") or {}).items(), 20)
    )
    return f"{function.get('name')}({', '.join(arguments)})"
