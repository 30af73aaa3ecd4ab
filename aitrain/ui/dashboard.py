"""The state of a running run as lines of text: a block for a terminal, or one line a step."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.text import Text

from aitrain.events import Ended, Evaluated, Evaluating, Event, Failed, Phase, Playing, Step
from aitrain.ui.duration import duration
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.plot import ASCII, BLOCKS, sparkline

LABEL = 10
"""Columns for the name of a line."""
WIDEST = 100
PATIENCE = 3.0
"""Seconds after which a phase shows its duration."""

BAD = "red"
DOUBTFUL = "yellow"


@dataclass
class Dashboard:
    """The latest event of each kind."""

    phase: str = "starting"
    since: float = field(default_factory=time.monotonic)
    """Time of the latest event."""
    step: Step | None = None
    rewards: list[float] = field(default_factory=list)
    scores: list[Evaluated] = field(default_factory=list)
    evaluating: Evaluating | None = None
    """The latest progress of an eval."""
    playing: Playing | None = None
    """The present rollout, if it takes seconds."""
    is_over: bool = False

    def take(self, event: Event) -> None:
        """Update the state with an event."""
        if isinstance(event, Playing):
            self.playing = event if event.episodes else None
            return
        self.since = time.monotonic()
        if isinstance(event, Phase):
            self.phase = escape_controls(event.text)
        elif isinstance(event, Evaluated) and event.sampled is not None:
            self.scores.append(event)
            self.phase = ""
        elif isinstance(event, Step):
            self.phase, self.step = "", event
            self.rewards += [] if event.reward is None else [event.reward]
        elif isinstance(event, Evaluating):
            self.phase, self.evaluating = "", event
        elif isinstance(event, (Ended, Failed)):
            self.playing, self.is_over = None, self.is_over or isinstance(event, Ended)

    def lines(self, width: int, ascii_only: bool = False) -> list[Text]:
        """At most nine lines, none wider than `width` columns."""
        ramp, width = ASCII if ascii_only else BLOCKS, min(width, WIDEST)
        lines = [Text(f"{name:<{LABEL}}", style="dim") + line for name, line in self.parts(width - LABEL, ramp)]
        for line in lines:
            line.truncate(width, overflow="crop")
        return lines

    def parts(self, width: int, ramp: str = BLOCKS) -> list[tuple[str, Text]]:
        """The lines with their names; without those that are empty."""
        elapsed = self._elapsed()
        now = f"{self.phase}  {duration(elapsed)}" if self.phase and elapsed >= PATIENCE else self.phase
        rollout = Text() if self.playing is None else _rollout(self.playing, width, ramp)
        named = [*self._of_the_run(width, ramp), *self._of_the_step(width), ("rollout", rollout), ("now", Text(now))]
        return [(name, line) for name, line in named if line.plain]

    @property
    def time_left(self) -> str:
        """`1m 20s left`; empty before the first step, and while something else than a step is done."""
        if self.step is None or self.phase:
            return ""
        return f"{duration(max(0.0, self.step.seconds_left - self._elapsed()))} left"

    def _of_the_run(self, width: int, ramp: str) -> list[tuple[str, Text]]:
        step = self.step
        if self.evaluating is not None:
            return self._of_the_eval(self.evaluating, width, ramp)
        if step is None:
            return [("held-out", self._held_out(width))]
        return [
            ("step", _progress(step.step, step.steps, self.time_left, width, ramp)),
            ("reward", self._reward(width, ramp)),
            ("held-out", self._held_out(width)),
        ]

    def _of_the_eval(self, event: Evaluating, width: int, ramp: str) -> list[tuple[str, Text]]:
        left = "" if self.phase else f"{duration(max(0.0, event.seconds_left - self._elapsed()))} left"
        failed = _share(event.failed or None, "failed", 1e-9, BAD)
        return [
            ("episodes", _progress(event.done, event.episodes, left, width, ramp)),
            ("score", joined([Text(number(event.score), "bold"), Text(event.decoding, "dim"), failed], width)),
        ]

    def _reward(self, width: int, ramp: str) -> Text:
        assert self.step is not None
        reward = Text(number(self.step.reward), "bold")
        if len(self.rewards) < 2:
            return reward
        ends = Text(f"{min(self.rewards):.2f} to {max(self.rewards):.2f}", "dim")
        line = Text(sparkline(self.rewards, min(60, width - len(reward) - len(ends) - 4), ramp), "cyan")
        return joined([reward, line, ends], width)

    def _held_out(self, width: int) -> Text:
        """The first and the last two scores of sampled completions."""
        shown = self.scores[:1] + self.scores[1:][-2:]
        return joined([Text(f"{number(one.sampled)} {_when(one)}") for one in shown], width)

    def _of_the_step(self, width: int) -> Iterable[tuple[str, Text]]:
        step = self.step
        if step is None:
            return
        flat = _share(step.flat_groups, "flat", 0.8)
        yield "groups", joined([flat, Text("(all scores equal)", "dim") if flat else Text()], width)
        ended = [_share(step.truncated, "truncated", 0.5), _share(step.failed, "failed", 1e-9, BAD)]
        yield "episodes", joined(ended, width)
        seconds = dict(step.seconds)
        whole = seconds.pop("step", None)
        yield "speed", joined(map(Text, [*_rate(step), *([] if whole is None else [f"{brief(whole)} a step"])]), width)
        yield "", joined([Text(f"{name} {brief(seconds[name])}") for name in PARTS if name in seconds], width)

    def _elapsed(self) -> float:
        return time.monotonic() - self.since


def _progress(done: int, of: int, left: str, width: int, ramp: str) -> Text:
    """`12/50 ━━━━──── 1m 20s left`."""
    count = f"{done}/{of}"
    columns = min(40, width - len(count) - 16)
    full, rest = ("#", "-") if ramp == ASCII else ("━", "─")
    filled = round(min(1.0, max(0.0, done / max(1, of))) * columns)
    bar = Text.assemble((full * filled, "green"), (rest * (columns - filled), "dim"))
    return joined([Text(count, "bold"), bar, Text(left)], width)


def _rollout(event: Playing, width: int, ramp: str) -> Text:
    return _progress(event.done, event.episodes, _tokens_per_second(event.tokens_per_second), width, ramp)


PARTS = ("generate", "environment", "optimize")


def step_line(event: Step) -> str:
    """A step on one line, for output that is not a terminal: `step 12/50  reward 0.531  1m 20s left`."""
    shares = {"flat groups": event.flat_groups, "truncated": event.truncated, "failed": event.failed}
    parts = [f"step {event.step}/{event.steps}", f"reward {number(event.reward)}"]
    parts += [f"{value:.0%} {name}" for name, value in shares.items() if value is not None]
    return "  ".join([*parts, *_rate(event), f"{duration(event.seconds_left)} left"])


def playing_line(event: Playing) -> str:
    """The progress of a rollout on one line: `rollout 12/64 episodes  812 tokens/s`."""
    return f"rollout {event.done}/{event.episodes} episodes  {_tokens_per_second(event.tokens_per_second)}".rstrip()


def evaluating_line(event: Evaluating) -> str:
    """The progress of an eval on one line: `episodes 64/128  score 0.250 sampled  20s left`."""
    failed = [f"{event.failed:.0%} failed"] if event.failed else []
    parts = [f"episodes {event.done}/{event.episodes}", f"score {number(event.score)} {event.decoding}", *failed]
    return "  ".join([*parts, f"{duration(event.seconds_left)} left"])


def evaluated_line(event: Evaluated) -> str:
    """`held-out score before: 0.250 sampled, 0.100 greedy`."""
    each = [f"{name} {number(score)}" for name, score in event.environments.items()]
    of_each = f" ({', '.join(each)})" if each else ""
    return f"held-out score {event.when}: {number(event.sampled)} sampled{of_each}, {number(event.greedy)} greedy"


def joined(parts: Iterable[Text], width: int) -> Text:
    """The parts side by side, without those that exceed the width."""
    line = Text()
    for part in parts:
        gap = "  " if line.plain and part.plain else ""
        if line.cell_len + len(gap) + part.cell_len <= width:
            line = line + gap + part
    return line


def brief(seconds: float) -> str:
    """Duration of a part of a step: `0.31s`, `12.4s`, `3m 05s`."""
    if seconds < 60:
        return f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.1f}s"
    return duration(seconds)


def number(value: float | None) -> str:
    """A score with three decimals, `-` for None."""
    return "-" if value is None else f"{value:.3f}"


def _rate(step: Step) -> list[str]:
    return [text] if (text := _tokens_per_second(step.tokens_per_second)) else []


def _tokens_per_second(rate: float | None) -> str:
    return "" if rate is None else f"{rate:,.0f} tokens/s"


def _when(event: Evaluated) -> str:
    return f"at {event.when}" if event.when.startswith("step") else event.when


def _share(value: float | None, of: str, worrying: float = 2.0, style: str = DOUBTFUL) -> Text:
    if value is None:
        return Text()
    return Text(f"{value:.0%} {of}", style if value >= worrying else "")
