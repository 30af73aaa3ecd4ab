"""Shows a run in the terminal: a live block while it runs, a table and a curve at the end; and the answers of one or
two models while they come.

All text is escaped.
"""

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from aitrain.events import Event, Note, Playing, RunStarted, Step
from aitrain.runs.diagnosis import findings_of
from aitrain.runs.held_out import VERDICT_STYLES, table_texts, verdict_sentence
from aitrain.ui.dashboard import Dashboard, duration, event_line, note_text, reward_line
from aitrain.ui.output import escape_controls
from aitrain.ui.overview import Overview

LINE_EVERY = 10.0
"""Seconds between two progress lines in a pipe or in CI."""


def can_be_drawn_over(console: Console) -> bool:
    """Whether output goes to a terminal that can move its cursor, outside of CI; not for a pipe with FORCE_COLOR."""
    is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return console.file.isatty() and console.is_interactive and not is_ci


class Screen:
    """Shows the events of a run: a block that is drawn over, below its notes; where nothing can be, plain lines."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)  # standard output is for the result only
        self.dashboard = Dashboard()
        self._live: Live | None = None
        self._last_line = 0.0

    def start(self) -> None:
        """Draw the block from now on. Call it after forking: a fork copies locks that the drawing thread holds."""
        if can_be_drawn_over(self.console):
            self._live = Live(
                console=self.console,
                get_renderable=lambda: self.dashboard,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Erase the block if the run has ended, as the result follows; leave it if the run failed."""
        if self._live is not None:
            self._live.transient = self.dashboard.is_over
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show one event. Plain lines of progress come once in LINE_EVERY seconds at most."""
        if isinstance(event, RunStarted):  # a trial of a sweep, after another one
            self.dashboard = Dashboard()
        self.dashboard.take(event)
        if isinstance(event, Note):
            self.print(note_text(event))
        elif self._live is None and (line := event_line(event)):
            if isinstance(event, (Step, Playing)):
                if time.monotonic() - self._last_line <= LINE_EVERY:
                    return
                self._last_line = time.monotonic()
            self.print(Text(line))

    def print(self, text: Text) -> None:
        """Print a text above the block."""
        self.console.print(text, soft_wrap=self._live is None)


# -- when it is over


def run_texts(overview: Overview) -> Iterator[Text]:
    """A run, now or at its end: scores, verdict, advice, findings, reward, episodes, where its files are, and what to
    do next."""
    run, result, steps = overview.run, overview.result, overview.step
    seconds = f" in {duration(result['seconds'])}" if result.get("seconds") else ""
    unit = "episodes" if overview.job == "eval" else "steps"
    extent = ("" if steps is None else f"  {steps} {unit}") + seconds
    yield Text.assemble((escape_controls(run.path.name), "bold"), f"  {escape_controls(overview.status)}{extent}")
    names = filter(None, (overview.model, overview.environment_name))
    yield Text(escape_controls(", ".join(names)) + "\n", "dim")
    if rows := table_texts(overview.scores):
        yield text_table([[Text(title, "bold") for title in ("held-out", "before", "after", "change")], *rows])
    else:
        yield Text(f"no held-out cases were scored{' yet' if overview.status == 'running' else ''}")
    if verdict := overview.verdict:
        yield Text(f"\n{verdict_sentence(overview.scores['sampled']['change'])}", f"bold {VERDICT_STYLES[verdict]}")
    if overview.advice:
        yield Text(overview.advice)
    for finding in findings_of(overview.run):
        yield Text(f"step {finding.step}: {escape_controls(finding.text)}", "yellow")
    if curve := reward_line(overview.rewards):
        yield Text("\nreward    ").append_text(curve)
    counted = overview.episodes
    if counted["all"]:
        ended = f"ended: {_numbers(counted['stops'])}"
        yield Text(f"\n{counted['all']:,} episodes, {counted['held_out']:,} of them held out; {ended}")
    if failures := counted["failures"] or result.get("failures"):
        of = counted["all"] or result["episodes"]
        failed = f"{sum(failures.values()):,} of {of:,} episodes ({_numbers(failures)})"
        command = f"aitrain show {shlex.quote(str(run.path))} --failed"
        yield Text(escape_controls(f"\nfailures: {failed}: {command}"), "red")
    yield Text()
    merged = run.model / "merged"
    places = {"model": run.model, "merged with its base": merged, "run folder": run.path, "report": run.report}
    for name, path in places.items():
        if path.exists():
            yield Text.assemble((f"{name}: ", "dim"), escape_controls(str(path)))
    if next_steps := overview.next_steps:
        yield Text("\nnext", "bold")
        yield text_table([(Text(f"  {step['what']}", "dim"), escape_controls(step["command"])) for step in next_steps])


def _numbers(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{escape_controls(name) or '?'} {count:,}" for name, count in counts.items())


def text_table(rows: Sequence[Sequence[str | Text]]) -> Text:
    """Cells in columns. Its lines are not wrapped, so that a program can read them."""
    cells = [[Text.assemble(cell) for cell in row] for row in rows]
    widths = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        for cell, width in zip(row, widths, strict=True):
            cell.pad_right(width - cell.cell_len)
        lines.append(Text("  ").join(row))
        lines[-1].rstrip()
    return Text("\n", no_wrap=True).join(lines)


# -- a chat


class ChatView:
    """The answers to one question, one model after the other, written as they come; and lines below them. `titles` are
    the models' names with what they are."""

    def __init__(self, console: Console, titles: Mapping[str, str]) -> None:
        self.console, self.titles = console, titles
        self._shown = dict[str, str]()

    def answer(self, name: str, text: str) -> None:
        """Show the text so far of a model's answer: what was not shown yet."""
        if name not in self._shown:
            self.write(("\n" if self._shown else "") + self.titles[name] + "\n", "bold")
        self.write(text[len(self._shown.get(name, "")) :])
        self._shown[name] = text

    def write(self, text: str, style: str = "") -> None:
        """Write text where the last one ended."""
        self.console.print(Text(escape_controls(text), style), end="", soft_wrap=True)
