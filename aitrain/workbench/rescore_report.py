"""The report of a rescoring: means before and after, what changed, and what could not be scored again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Console
from rich.text import Text

from aitrain.errors import EnvironmentFailed, RunFailed
from aitrain.runs.json_values import JsonObject
from aitrain.runs.run_folder import to_jsonable
from aitrain.runs.statistics import weighted_mean
from aitrain.ui.escape_controls import escape_controls
from aitrain.workbench.episode_view import show_heading, show_text
from aitrain.workbench.rescore import SAME, RescoredEpisode


@dataclass
class PhaseCount:
    """Counts of one scoring, or of training."""

    episodes: int = 0
    unscored_before: int = 0
    scored_after: int = 0
    unscored_after: int = 0
    """Episodes that today's scorer gives no score, without those that could not be scored again."""
    changed: int = 0
    before: list[float] = field(default_factory=list)
    """Scores of the episodes that have one before and after."""
    after: list[float] = field(default_factory=list)
    parts: dict[str, PhaseCount] = field(default_factory=dict)
    """Of each environment, in a run with several."""

    def add(self, episode: RescoredEpisode) -> None:
        """Count an episode."""
        self.episodes += 1
        self.unscored_before += episode.before is None
        if episode.problem:
            return
        self.scored_after += episode.after is not None
        self.unscored_after += episode.after is None
        self.changed += is_changed(episode)
        if episode.before is not None and episode.after is not None:
            self.before.append(episode.before)
            self.after.append(episode.after)

    def means(self, shares: Mapping[str, float]) -> tuple[float | None, float | None]:
        """Mean score before and after; with `shares`, of the means of the environments, weighted with them."""
        parts = [(shares[name], part) for name, part in self.parts.items() if name in shares and part.before]
        parts = parts or ([(1.0, self)] if self.before else [])
        before, after = ([(share, fmean(getattr(part, end))) for share, part in parts] for end in ("before", "after"))
        return weighted_mean(before), weighted_mean(after)

    def to_json(self, shares: Mapping[str, float]) -> JsonObject:
        """The counts and means."""
        before, after = self.means(shares)
        parts = {name: part.to_json({}) for name, part in self.parts.items()}
        return {
            "episodes": self.episodes,
            "compared": len(self.before),
            "mean_before": before,
            "mean_after": after,
            "changed": self.changed,
            "unscored_before": self.unscored_before,
            "unscored_after": self.unscored_after,
            **({"environments": parts} if parts else {}),
        }


@dataclass
class RescoreReport:
    """What a rescoring found."""

    most: int
    """How many of the most changed episodes are kept."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """The share of each environment in the held-out scores, if there are several."""
    phases: dict[str, PhaseCount] = field(default_factory=dict)
    """By evaluation phase; training is empty."""
    problems: Counter[str] = field(default_factory=Counter)
    """Why episodes could not be scored again."""
    failures: Counter[str] = field(default_factory=Counter)
    """Why today's scorer failed."""
    from_record: int = 0
    most_changed: list[RescoredEpisode] = field(default_factory=list)

    def add_all(self, episodes: Iterable[RescoredEpisode]) -> RescoreReport:
        """Count the episodes; returns the report itself."""
        for episode in episodes:
            phase = self.phases.setdefault(episode.eval_phase, PhaseCount())
            phase.add(episode)
            if episode.environment and episode.environment in self.shares:
                phase.parts.setdefault(episode.environment, PhaseCount()).add(episode)
            self.problems.update([episode.problem] if episode.problem else [])
            self.failures.update([episode.failure] if episode.failure else [])
            self.from_record += episode.is_from_record
            if is_changed(episode):
                self.most_changed.append(episode)
                if len(self.most_changed) > 10 * self.most + 100:
                    self._keep_most()
        self._keep_most()
        return self

    def _keep_most(self) -> None:
        self.most_changed = sorted(self.most_changed, key=_size_of_change, reverse=True)[: self.most]

    @property
    def episodes(self) -> int:
        """Number of all episodes."""
        return sum(phase.episodes for phase in self.phases.values())

    def check(self) -> None:
        """Check that at least one episode was scored again.

        Raises:
            EnvironmentFailed: today's scorer failed on all of them.
            RunFailed: none could be given to it.
        """
        if any(phase.scored_after for phase in self.phases.values()):
            return
        none = f"None of {self.episodes} episodes could be scored again"
        if self.failures:
            (failure, count), *_ = self.failures.most_common(1)
            raise EnvironmentFailed(f"{none}; {count} failed:\n{failure}")
        (problem, _), *_ = self.problems.most_common(1) or [("the score is None", 0)]
        raise RunFailed(f"{none}: {problem}")

    def to_json(self) -> JsonObject:
        """The report as a JSON object."""
        return {
            "episodes": self.episodes,
            "not_rescored": dict(self.problems),
            "failed": dict(self.failures),
            "scored_with_saved_rows": self.from_record,
            "phases": {
                phase or "training": count.to_json(self._shares_of(phase)) for phase, count in self.phases.items()
            },
            "most_changed": [
                {
                    "step": one.step,
                    "eval_phase": one.eval_phase or None,
                    **({"environment": one.environment} if one.environment else {}),
                    "case": one.case,
                    "case_idx": to_jsonable(one.case_idx),
                    "before": one.before,
                    "after": one.after,
                    "prompt": one.prompt,
                    "answer": one.answer,
                }
                for one in self.most_changed
            ],
        }

    def show(self, console: Console) -> None:
        """Print the report."""
        lines: list[tuple[str, ...]] = [("", "episodes", "compared", "before", "after", "changed")]
        for phase, count in self.phases.items():
            name = f"held-out, {escape_controls(phase).replace('_', ', ')}" if phase else "training"
            lines.append(_line(name, count, self._shares_of(phase)))
            lines += [_line(f"{name}, {escape_controls(env)}", part, {}) for env, part in count.parts.items()]
        width = max(len(line[0]) for line in lines)
        for name, *numbers in lines:
            text = f"{name:{width}}" + "".join(f"{number:>10}" for number in numbers)
            console.print(Text(text, style="" if name else "dim"), soft_wrap=True)
        for note in self._notes():
            show_text(console, note)
        if self.most_changed:
            console.print(Text("\nmost changed", style="bold"))
        for one in self.most_changed:
            _show_changed(console, one)

    def _shares_of(self, phase: str) -> Mapping[str, float]:
        """The shares for a mean score: that of training is the mean of all episodes."""
        return self.shares if phase else {}

    def _notes(self) -> Sequence[str]:
        unscored = [sum(getattr(phase, name) for phase in self.phases.values()) for name in _UNSCORED]
        notes = [f"\nunscored: {unscored[0]} before, {unscored[1]} now"] if any(unscored) else []
        notes += [f"  {count} failed: {failure}" for failure, count in self.failures.most_common(3)]
        if self.problems:
            notes.append(f"\nnot scored again: {sum(self.problems.values())}")
            notes += [f"  {count}: {problem}" for problem, count in self.problems.most_common()]
        if self.from_record:
            notes.append(
                f"\n{self.from_record} episodes are of cases that are not in today's dataset: they were scored with"
                " their saved rows"
            )
        return notes


_UNSCORED = ("unscored_before", "unscored_after")


def is_changed(episode: RescoredEpisode) -> bool:
    """Whether the score is another one, or there is one only before or only after."""
    if episode.problem:
        return False
    change = episode.change
    return (episode.before is None) != (episode.after is None) if change is None else abs(change) > SAME


def _size_of_change(episode: RescoredEpisode) -> float:
    """Scores that appeared or vanished come first."""
    return float("inf") if episode.change is None else abs(episode.change)


def _line(name: str, count: PhaseCount, shares: Mapping[str, float]) -> tuple[str, ...]:
    means = ["-" if mean is None else f"{mean:.3f}" for mean in count.means(shares)]
    return (name, f"{count.episodes:,}", f"{len(count.before):,}", *means, f"{count.changed:,}")


def _show_changed(console: Console, one: RescoredEpisode) -> None:
    named = f" (case_idx {one.case_idx})" if str(one.case_idx) != str(one.case) else ""
    phase = f" {one.eval_phase.replace('_', ', ')}" if one.eval_phase else ""
    env = f", {one.environment}" if one.environment else ""
    show_heading(
        console, f"step {one.step}{phase}{env}, case {one.case}{named}: {_number(one.before)} -> {_number(one.after)}"
    )
    for name, text in (("prompt", one.prompt), ("answer", one.answer), ("failed", one.failure)):
        if text:
            show_text(console, f"{name}: {text}", "dim" if name == "prompt" else "")


def _number(score: float | None) -> str:
    return "none" if score is None else f"{score:.3f}"
