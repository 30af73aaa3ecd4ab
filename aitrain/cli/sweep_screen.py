"""Shows a sweep in the terminal: a line for each trial that begins or ends, and the live block of the one that runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console
from rich.text import Text

from aitrain.cli.verbosity import Verbosity
from aitrain.events import Announce, Evaluated, Event, Note
from aitrain.redaction import redact
from aitrain.runs.run_folder import RunFolder
from aitrain.runs.sweep_record import SweepRecord, Trial
from aitrain.ui.dashboard import evaluated_line
from aitrain.ui.duration import duration
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.log_tail import LogTail
from aitrain.ui.sweep_page import write_page
from aitrain.ui.sweep_table import trial_line, values_text
from aitrain.ui.terminal import Screen, on_standard_error


@dataclass
class SweepScreen:
    """The terminal of a sweep. With several trials at a time there are only lines."""

    record: SweepRecord
    parallel: int
    verbosity: Verbosity
    console: Console = field(init=False)
    started: float = field(default_factory=time.monotonic)
    played: int = 0
    """Trials that this process has played to their end."""
    notes: set[str] = field(default_factory=set)
    """Texts of the notes that were shown."""
    block: Screen | None = None

    def __post_init__(self) -> None:
        self.console = Console(quiet=True) if self.verbosity.quiet else on_standard_error()

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(Text(escape_controls(text)), soft_wrap=True)

    def of_trial(self, trial: Trial) -> Announce:
        """Where the events of a trial go."""
        if self.parallel > 1:
            return partial(self._show_once, partial(self._line, trial))
        log = RunFolder(self.record.folder / trial.name).log
        self.block = Screen(self.console, LogTail(log) if self.verbosity.verbose else list)
        return partial(self._show_once, self.block.__enter__().start())

    def on_change(self, trial: Trial) -> None:
        """A trial begins or ends."""
        self.close()
        place = f"{trial.name} ({trial.number + 1} of {self.record.planned})"
        if trial.status == "running":
            self.say(f"{place}: {values_text(trial.values)}")
            return
        self.played += 1
        left = self.record.planned - sum(one.has_ended for one in self.record.trials)
        seconds = (time.monotonic() - self.started) / self.played * left
        more = f", about {duration(seconds)} left" if left and trial.has_ended else ""
        best = self.record.best
        ahead = f"; best so far {best.score:.3f} ({best.name})" if best is not None and best is not trial else ""
        self.say(f"{place}: {trial_line(trial)}{ahead}{more}")
        write_page(self.record)

    def close(self) -> None:
        """Erase the live block."""
        if self.block is not None:
            self.block.dashboard.is_over = True  # the line of the trial says how it ended
            self.block.__exit__(None, None, None)
            self.block = None

    def _show_once(self, show: Announce, event: Event) -> None:
        """Show an event, but each note only once: all trials have the same ones on the environment."""
        if isinstance(event, Note):
            if event.text in self.notes:
                return
            self.notes.add(event.text)
        show(event)

    def _line(self, trial: Trial, event: Event) -> None:
        if isinstance(event, Note):
            self.say(f"{event.mark}{trial.name}: {redact(event.text)}")
        elif isinstance(event, Evaluated) and event.sampled is not None:
            self.say(f"{trial.name}: {evaluated_line(event)}")
