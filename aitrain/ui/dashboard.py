"""The state of a running run as lines of text: a block for a terminal and a notebook, or one line a step."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from aitrain.events import Ended, Evaluated, Event, Failed, Note, Phase, Playing, Step
from aitrain.redaction import redact
from aitrain.ui.output import escape_controls

LABEL, BAR, CURVE = 10, 40, 60
"""Columns for the name of a line, and of a bar and a curve at most."""
PATIENCE = 3.0
"""Seconds after which a phase shows its duration."""
BLOCKS = "▁▂▃▄▅▆▇█"
PARTS = ("generate", "environment", "optimize")
LEAST_SPAN = 0.1
"""Minimum range of a sparkline's height, so that noise does not look like a change."""


@dataclass
class Dashboard:
    """The latest event of each kind."""

    phase: str = "starting"
    since: float = field(default_factory=time.monotonic)
    """Time of the latest event."""
    step: Step | None = None
    rewards: list[float] = field(default_factory=list)
    scores: list[Evaluated] = field(default_factory=list)
    playing: Playing | None = None
    """The present rollout, if it takes seconds."""
    is_over: bool = False

    def take(self, event: Event) -> None:
        """Update the state with an event."""
        match event:
            case Playing():
                self.playing = event if event.episodes else None
                return
            case Phase():
                self.phase = escape_controls(event.text)
            case Evaluated() if event.sampled is not None:
                self.scores.append(event)
                self.phase = ""
            case Step():
                self.phase, self.step = "", event
                self.rewards += [] if event.reward is None else [event.reward]
            case Ended() | Failed():
                self.playing, self.is_over = None, self.is_over or isinstance(event, Ended)
        self.since = time.monotonic()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The lines, cut at the edge of the terminal."""
        for name, line in self.parts(options.max_width - LABEL).items():
            yield Text.assemble((f"{name:<{LABEL}}", "dim"), line, no_wrap=True, overflow="crop")

    def parts(self, width: int) -> dict[str, Text]:
        """The lines by their names; without those that are empty."""
        elapsed = time.monotonic() - self.since
        lines: dict[str, Text] = {}
        if (step := self.step) is not None:
            left = f"{duration(max(0.0, step.seconds_left - elapsed))} left"
            lines["step"] = _progress(step.step, step.steps, left, width)
            reward = Text(number(step.reward), "bold")
            lines["reward"] = _joined(reward, reward_line(self.rewards, width - len(reward) - 2))
        scores = [*self.scores[:1], *self.scores[1:][-2:]]  # the first and the last two
        lines["held-out"] = _joined(*(Text(f"{number(one.sampled)} {one.when}") for one in scores))
        if (step := self.step) is not None:
            lines["groups"] = _share(step.flat_groups, "flat (all scores equal)")
            failed = _share(step.failed, "failed", "red" if step.failed else "")
            lines["episodes"] = _joined(_share(step.truncated, "truncated"), failed)
            seconds = {name: f"{value:.2f}s" for name, value in step.seconds.items()}
            whole = f"{seconds['step']} a step" if "step" in seconds else ""
            lines["speed"] = _joined(Text(_tokens_per_second(step.tokens_per_second)), Text(whole))
            lines[""] = _joined(*(Text(f"{name} {seconds[name]}") for name in PARTS if name in seconds))
        if (rollout := self.playing) is not None:
            speed = _tokens_per_second(rollout.tokens_per_second)
            lines["rollout"] = _progress(rollout.done, rollout.episodes, speed, width)
        lines["now"] = Text(f"{self.phase}  {duration(elapsed)}" if self.phase and elapsed >= PATIENCE else self.phase)
        return {name: line for name, line in lines.items() if line.plain}


def note_text(note: Note) -> Text:
    """A note for the screen, without secrets."""
    return Text(note.mark + escape_controls(redact(note.text)), "yellow" if note.level == "warning" else "")


def event_line(event: Event) -> str:
    """An event on one line, for output that is not a terminal: `step 12/50  1m 20s left  reward 0.531`; empty if it has
    none."""
    if isinstance(event, Phase):
        return event.text
    if isinstance(event, Evaluated) and event.sampled is not None:
        return f"held-out score {event.when}: {number(event.sampled)} sampled, {number(event.greedy)} greedy"
    dashboard = Dashboard(phase="")
    dashboard.take(event)
    return "  ".join(f"{name} {line}".strip() for name, line in dashboard.parts(0).items())


# -- parts of lines


def number(value: float | None) -> str:
    """A score with three decimals, `-` for None."""
    return "-" if value is None else f"{value:.3f}"


def duration(seconds: float) -> str:
    """`8s`, `3m 05s`, `2h 10m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def _progress(done: int, of: int, rest: str, width: int) -> Text:
    """`12/50 ━━━━──── 1m 20s left`."""
    columns = max(0, min(BAR, width - 26))
    filled = round(min(1.0, max(0.0, done / max(1, of))) * columns)
    bar = Text.assemble(("━" * filled, "green"), ("─" * (columns - filled), "dim"))
    return _joined(Text(f"{done}/{of}", "bold"), bar, Text(rest))


def _joined(*parts: Text) -> Text:
    """The parts side by side, without empty ones."""
    return Text("  ").join(part for part in parts if part.plain)


def _tokens_per_second(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f} tokens/s"


def _share(value: float | None, of: str, style: str = "") -> Text:
    return Text() if value is None else Text(f"{value:.0%} {of}", style)


# -- curves


def reward_line(rewards: Sequence[float], width: int = CURVE) -> Text:
    """The rewards as a curve of one line, with the lowest and the highest one; empty for fewer than two."""
    if len(rewards) < 2:
        return Text()
    ends = f"{min(rewards):.2f} to {max(rewards):.2f}"
    size = math.ceil(len(rewards) / max(1, min(CURVE, width - len(ends) - 2)))
    columns = [fmean(rewards[start : start + size]) for start in range(0, len(rewards), size)]
    low = min(columns)
    span = max(max(columns) - low, LEAST_SPAN)
    line = "".join(BLOCKS[round((value - low) / span * 7)] for value in columns)
    return _joined(Text(line, "cyan"), Text(ends, "dim"))
