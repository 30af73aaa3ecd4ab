"""Shows texts of models and environments in the terminal, escaped."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from aitrain.ui.escape_controls import escape_controls

SPECIAL_TOKEN = r"<\|[^|<>\s]{1,40}\|>|</?s>|<(start|end)_of_turn>"
STOPS = {
    "done": "the environment ended the episode",
    "max_tokens": "the environment ended the episode, its last answer was cut off",
    "max_turns": "the limit of turns ended the episode",
    "truncated": "no room for another answer",
    "no_room": "the prompt leaves no room for an answer",
    "out_of_replies": "there is no further answer",
}
"""Why an episode ended, in words."""


def show_heading(console: Console, text: str) -> None:
    """`-- text ----------`, as wide as the terminal, at most 80 columns."""
    line = f"-- {escape_controls(text)} "
    console.print(Text(line.ljust(min(80, console.width), "-"), style="bold"), soft_wrap=True)


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
