"""Shows a run in the terminal: a live block while it runs, a table and a curve at the end."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from aitrain.events import Evaluated, Evaluating, Event, Note, Step
from aitrain.redaction import redact
from aitrain.runs.held_out import ScoreTable, interval_texts
from aitrain.runs.result import Result
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.verdict import VERDICT_STYLES, VERDICT_WORDS, verdict_sentence
from aitrain.ui.dashboard import ASCII, CURVE, Dashboard, curve, event_line, number
from aitrain.ui.duration import duration
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.loading import is_ci
from aitrain.ui.overview import Overview

LINE_EVERY = 10.0
"""Seconds between two progress lines in a pipe or in CI."""
DRAW_EVERY = 1.0
"""Seconds between two redraws without an event, for the clocks."""
DRAW_AT_MOST = 0.1
"""Minimum seconds between two redraws when events are frequent."""


def on_standard_error() -> Console:
    """The console of a run; standard output is for its result only."""
    return Console(stderr=True, highlight=False)


def can_be_drawn_over(console: Console) -> bool:
    """Whether output goes to a terminal that can move its cursor, outside of CI; not for a pipe with FORCE_COLOR."""
    is_watched = console.file.isatty() and console.is_interactive
    return is_watched and not (console.is_dumb_terminal or console.quiet or is_ci())


@dataclass
class Screen:
    """Shows the events of a run.

    `start` starts the thread that redraws the clocks. Call it after forking: a fork copies locks that a thread holds.
    """

    console: Console = field(default_factory=on_standard_error)
    new_lines: Callable[[], list[str]] = list
    """Returns new lines of the libraries' output, which are shown above the block."""
    last_line: float = 0.0
    last_drawn: float = 0.0

    def __post_init__(self) -> None:
        self.dashboard = Dashboard()
        self.live: Live | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Screen:
        if can_be_drawn_over(self.console):
            self.live = Live(
                console=self.console,
                get_renderable=lambda: self.dashboard,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self.live.start(refresh=True)
        return self

    def start(self) -> Screen:
        """Redraw every second, and show new lines of the libraries' output."""
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Erase the block if the run has ended, as the result follows; leave it if the run failed."""
        self._closed.set()
        if self._ticker.is_alive():
            self._ticker.join()
        with self._lock:
            self._print_new_lines()
            if self.live is not None:
                self.live.transient = self.dashboard.is_over
                self.live.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        with self._lock:
            self._print_new_lines()
            self.dashboard.take(event)
            if isinstance(event, Note):
                style = "yellow" if event.level == "warning" else ""
                self._print(Text(event.mark + escape_controls(redact(event.text)), style=style))
            elif self.live is None:
                self._print_line(event)
            self._draw()

    def _print_line(self, event: Event) -> None:
        """Print an event as a plain line: scores and the ends always, others at most one every LINE_EVERY seconds."""
        is_end = isinstance(event, Step) and event.step == event.steps
        is_end |= isinstance(event, Evaluating) and event.done == event.episodes
        is_due = time.monotonic() - self.last_line > LINE_EVERY
        if (line := event_line(event)) and (is_due or is_end or isinstance(event, Evaluated)):
            self.last_line = self.last_line if isinstance(event, Evaluated) else time.monotonic()
            self._print(Text(line))

    def _print(self, text: Text) -> None:
        self.console.print(text, soft_wrap=self.live is None)

    def _tick(self) -> None:
        while not self._closed.wait(DRAW_EVERY):
            with self._lock:
                self._print_new_lines()
                self._draw()

    def _print_new_lines(self) -> None:
        for line in self.new_lines():
            self._print(Text(escape_controls(line), style="dim"))

    def _draw(self) -> None:
        if self.live is not None and time.monotonic() - self.last_drawn > DRAW_AT_MOST:
            self.last_drawn = time.monotonic()
            self.live.refresh()


# -- when it is over


def last_line(result: Result) -> str:
    """The result on one line: `held-out score 0.245 -> 0.912 (better)  80 steps in 48s  runs/demo`."""
    scores = f"held-out score {number(result.score_before)} -> {number(result.score_after)}"
    words = f" ({VERDICT_WORDS[result.verdict]})" if result.verdict else ""
    return f"{scores}{words}  {result.steps} steps in {duration(result.seconds)}  {escape_controls(str(result.folder))}"


def show_result(result: Result, overview: Overview, console: Console) -> None:
    """Print what came of a run: scores, verdict, curve, where everything is, and what to do next."""

    def show(*parts: str | tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)

    console.print(score_table(overview.scores), soft_wrap=True)
    if verdict := overview.verdict:
        show((f"\n{verdict_sentence(overview.scores['sampled']['change'])}", f"bold {VERDICT_STYLES[verdict]}"))
    if text := overview.advice:
        show(text)
    show((f"\n{result.steps} steps in {duration(result.seconds)}", "dim"))
    if len(overview.rewards) > 1:
        show(f"reward over {result.steps} steps")
        console.print(reward_curve(overview.rewards, console))
    show("")
    for name, text, style in _facts(result):
        show((f"{name}: ", "" if style else "dim"), (escape_controls(text), style))
    steps = overview.next_steps
    width = max((len(step["what"]) for step in steps), default=0)
    if steps:
        show(("\nnext", "bold"))
    for step in steps:
        show((f"  {step['what']:{width}}  ", "dim"), escape_controls(step["command"]))


def _facts(result: Result) -> Iterator[tuple[str, str, str]]:
    """Names, values and styles of what a run has left."""
    folder = RunFolder(result.folder)
    if folder.model.exists():
        kind = " (adapter)" if (folder.model / "adapter_config.json").exists() else ""
        chosen = ""
        if result.selection_score is not None:
            of = f"the best of {result.selection_scorings} evaluations, {result.selection_score:.3f}"
            by = "on other held-out cases" if result.selection_cases else "with new samples"
            chosen = f", step {result.model_step}: {of}; above is its score {by}"
        yield "model", f"{folder.model}{kind}{chosen}", ""
        if (merged := folder.model / "merged").exists():
            yield "merged with its base", str(merged), ""
    if reached := result.time_to_target:
        took = "" if reached["seconds"] is None else f", {duration(reached['seconds'])} of training"
        tokens = "" if reached["tokens"] is None else f", {reached['tokens']:,} sampled tokens"
        yield f"{reached['target']:g} reached", f"after {reached['steps']} steps{took}{tokens}", ""
    if failed := sum(result.failures.values()):
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in result.failures.items())
        command = f"aitrain show {shlex.quote(str(result.folder))} --failed"
        yield "failures", f"{failed:,} of {result.episodes:,} episodes ({kinds}): {command}", "red"
    yield "run folder", str(result.folder), ""
    if folder.report.exists():
        yield "report", str(folder.report), ""


def reward_curve(rewards: Sequence[float], console: Console) -> Text:
    """The curve of the rewards, as wide as the terminal allows."""
    text = "\n".join(curve(rewards, min(CURVE, console.width - 8)))
    return Text(text.translate(ASCII) if console.options.ascii_only else text)


def text_table(rows: Sequence[Sequence[str | Text]]) -> Text:
    """A table whose first row is its head. Its lines are not wrapped, so that a program can read them."""
    cells = [
        [cell if isinstance(cell, Text) else Text(cell, "" if place else "bold") for cell in row]
        for place, row in enumerate(rows)
    ]
    widths = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        for cell, width in zip(row[:-1], widths, strict=False):
            cell.pad_right(width - cell.cell_len)
        lines.append(Text("  ").join(row))
        lines[-1].rstrip()
    lines[0].stylize("bold")
    return Text("\n").join(lines)


def score_table(scores: ScoreTable) -> Text:
    """The held-out scores before and after with 95% intervals."""
    rows = [(name, *interval_texts(row)) for name, row in scores.items() if row["before"] or row["after"]]
    return (
        text_table([("held-out", "before", "after", "change"), *rows])
        if rows
        else Text("no held-out cases were scored")
    )
