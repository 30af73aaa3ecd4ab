"""Shows a run in the terminal: a live block while it runs, a table and a curve at the end."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.text import Text

from aitrain.events import Evaluated, Evaluating, Event, Note, Phase, Playing, Step
from aitrain.redaction import redact
from aitrain.runs.held_out import ScoreTable, interval_texts
from aitrain.runs.result import Result
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.verdict import VERDICT_STYLES, VERDICT_WORDS, verdict_of_scores, verdict_sentence
from aitrain.ui.block import Block, can_be_drawn_over
from aitrain.ui.dashboard import Dashboard, evaluated_line, evaluating_line, number, playing_line, step_line
from aitrain.ui.duration import duration
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.next_steps import advice, next_steps
from aitrain.ui.plot import ASCII, BLOCKS, curve

LINE_EVERY = 10.0
"""Seconds between two progress lines in a pipe or in CI."""
DRAW_EVERY = 1.0
"""Seconds between two redraws without an event, for the clocks."""
DRAW_AT_MOST = 0.1
"""Minimum seconds between two redraws when events are frequent."""


def on_standard_error() -> Console:
    """The console of a run; standard output is for its result only."""
    return Console(stderr=True, highlight=False)


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
        self.block = Block(self.console) if can_be_drawn_over(self.console) else None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Screen:
        self._draw()
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
            if self.block is not None and self.dashboard.is_over:
                self.block.erase()
            elif self.block is not None:
                self.block.leave()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        with self._lock:
            self._print_new_lines()
            self.dashboard.take(event)
            if isinstance(event, Note):
                style = "yellow" if event.level == "warning" else ""
                self._keep(Text(event.mark + escape_controls(redact(event.text)), style=style))
            elif self.block is None:
                self._print_line(event)
            self._draw()

    def _print_line(self, event: Event) -> None:
        """Print an event as a plain line, at most one every LINE_EVERY seconds."""
        if isinstance(event, Evaluated) and event.sampled is not None:
            self._keep(Text(evaluated_line(event)))
        is_due = time.monotonic() - self.last_line > LINE_EVERY
        if isinstance(event, Phase) and is_due:
            self._progress(event.text)
        elif isinstance(event, Step) and (is_due or event.step == event.steps):
            self._progress(step_line(event))
        elif isinstance(event, Evaluating) and (is_due or event.done == event.episodes):
            self._progress(evaluating_line(event))
        elif isinstance(event, Playing) and event.episodes and is_due:
            self._progress(playing_line(event))

    def _progress(self, text: str) -> None:
        self.last_line = time.monotonic()
        self._keep(Text(text))

    def _keep(self, text: Text) -> None:
        if self.block is not None:
            self.block.print_above(text)
        else:
            self.console.print(text, soft_wrap=True)

    def _tick(self) -> None:
        while not self._closed.wait(DRAW_EVERY):
            with self._lock:
                self._print_new_lines()
                self._draw()

    def _print_new_lines(self) -> None:
        for line in self.new_lines():
            self._keep(Text(escape_controls(line), style="dim"))

    def _draw(self) -> None:
        if self.block is None or self._closed.is_set():
            return
        if not self.block.drawn or time.monotonic() - self.last_drawn > DRAW_AT_MOST:
            self.last_drawn = time.monotonic()
            self.block.draw(self.dashboard.lines(self.console.width - 1, self.console.options.ascii_only))


def last_line(result: Result) -> str:
    """The result on one line: `held-out score 0.245 -> 0.912 (better)  80 steps in 48s  runs/demo`."""
    scores = f"held-out score {number(result.score_before)} -> {number(result.score_after)}"
    words = f" ({VERDICT_WORDS[result.verdict]})" if result.verdict else ""
    return f"{scores}{words}  {result.steps} steps in {duration(result.seconds)}  {escape_controls(str(result.folder))}"


def show_result(result: Result, scores: ScoreTable, console: Console) -> None:
    """Print what came of a run: scores, verdict, curve, where everything is, and what to do next."""

    def show(*parts: str | tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)

    folder, rewards = RunFolder(result.folder), [line.get("reward") for line in result.history]
    console.print(score_table(scores), soft_wrap=True)
    if verdict := verdict_of_scores(scores):
        show((f"\n{verdict_sentence(scores['sampled']['change'])}", f"bold {VERDICT_STYLES[verdict]}"))
    if text := advice(folder):
        show(text)
    show((f"\n{result.steps} steps in {duration(result.seconds)}", "dim"))
    if len(known := [reward for reward in rewards if reward is not None]) > 1:
        show(f"reward over {result.steps} steps")
        console.print(reward_curve(known, console))
    show("")
    for name, text, style in _facts(result):
        show((f"{name}: ", "" if style else "dim"), (escape_controls(text), style))
    steps = next_steps(folder)
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
    ramp = ASCII if console.options.ascii_only else BLOCKS
    return Text("\n".join(curve(rewards, min(60, console.width - 8), ramp=ramp)))


def score_table(scores: ScoreTable) -> Text:
    """Table of the held-out scores before and after with 95% intervals, from result.json. Lines are not wrapped."""
    rows = {decoding: row for decoding, row in scores.items() if row["before"] or row["after"]}
    if not rows:
        return Text("no held-out cases were scored")
    lines = [("held-out", "before", "after", "change"), *((name, *interval_texts(row)) for name, row in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    head, *rest = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    ]
    return Text.assemble((head, "bold"), *(f"\n{line}" for line in rest))
