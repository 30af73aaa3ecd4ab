"""`aitrain env rescore`: applies today's scorer to the saved episodes of a run. Episodes of several turns are replayed
with the saved answers, and count if the environment says what it said then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aitrain.environment.contract import Case, as_messages, env_kind
from aitrain.environment.runner import AbsentModel
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.environment.session import Message
from aitrain.errors import ConfigError, EnvironmentFailed, RunFailed
from aitrain.options.train import TrainConfig
from aitrain.redaction import to_jsonable
from aitrain.rollout.episode import Episode
from aitrain.runs.json_values import as_text
from aitrain.runs.records import RolloutRecord, row_columns
from aitrain.ui.output import escape_controls
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.play import show_heading, show_text
from aitrain.workbench.player import Conversation, Player

BATCH = 256
EXCERPT = 400
"""Characters that are kept of a prompt and an answer."""
SAME = 1e-9
"""Scores that differ by less are the same."""
DIFFERENT = "the environment or a tool answered differently"


@dataclass(frozen=True)
class RescoredEpisode:
    """A saved episode: its score then, and today's."""

    step: int
    eval_phase: str
    case: int | None
    case_idx: object
    before: float | None
    after: float | None
    problem: str = ""
    """Why it could not be scored again; empty if it was, or if today's scorer failed."""
    failure: str = ""
    """Why today's scorer gave no score."""
    is_from_record: bool = False
    """Whether its case is not in today's dataset, so that it was scored with the saved row."""
    prompt: str = ""
    answer: str = ""
    environment: str = ""
    """Name of its environment, in a run with several."""

    @property
    def change(self) -> float:
        """By how much the score changed, infinite if there is one only before or only after; 0 if it is the same."""
        if self.problem or (self.before is None and self.after is None):
            return 0.0
        if self.before is None or self.after is None:
            return float("inf")
        change = self.after - self.before
        return change if abs(change) > SAME else 0.0


def rescore(
    opened: OpenedEnvironment, config: TrainConfig, tokenizer: object, records: Iterable[RolloutRecord]
) -> Iterator[RescoredEpisode]:
    """Each episode with today's score, batch by batch.

    Raises:
        ConfigError: the environment scores groups of episodes together.
    """
    known = {case.number: case for case in opened.all_cases}
    records = iter(records)
    with closing(Player(opened.environment, config)) as player:
        if player.runner.scores_groups:
            raise ConfigError("rescore: score_group compares episodes, and saved ones are scored one by one")
        player.runner.offer(AbsentModel(why="saved episodes are scored without one"), tokenizer)
        while batch := [Replay(record, opened.environment, known) for record in islice(records, BATCH)]:
            ready = [replay for replay in batch if not replay.problem]
            seeds = [replay.record.seed or 0 for replay in ready]
            played = iter(player.play([(replay.case, replay) for replay in ready], seeds))
            yield from (replay.rescored(None if replay.problem else next(played)) for replay in batch)


class Replay:
    """A policy that gives the answers of a record."""

    def __init__(self, record: RolloutRecord, environment: object, known: Mapping[int, Case]) -> None:
        """`known` are today's cases, by their numbers."""
        self.record = record
        asked = len(as_messages(record.prompt))
        self.answers = [message for message in record.messages[asked:] if message.get("role") == "assistant"]
        case = known.get(-1 if record.row_number is None else record.row_number)
        is_known = case and to_jsonable(case.prompt) == record.prompt and row_columns(case.row) == record.row
        row = {**record.row, "prompt": record.prompt}
        saved = Case(record.case_idx, record.prompt, row, record.row_number or 0)
        self.case = case if case and is_known else saved
        self.is_from_record = self.case is saved
        kind = env_kind(environment)
        self.problem = ""
        """Why the record cannot be scored again; empty if it can."""
        if not self.answers:
            self.problem = "it has no answer"
        elif kind == "rollout":
            self.problem = "rollout plays its episodes itself, so that they cannot be replayed"
        elif kind == "score_episode" and record.stop == "truncated" and record.messages[-1].get("tool_calls"):
            self.problem = "it was cut off after a tool call"
        elif self.is_from_record and isinstance(environment, ServedEnvironment):
            self.problem = "its row is not in the dataset of the environment's server, which scores no other rows"
        elif self.is_from_record and any(str(value).startswith("(left out: ") for value in record.row.values()):
            self.problem = "a column was too long to be saved, and the row is not in today's dataset"

    def __call__(self, said: Conversation) -> Message | None:
        """The next recorded answer; None after the last one, and where the conversations part."""
        has_answer = said.answers < len(self.answers) and self._agrees(said.messages)
        return self.answers[said.answers] if has_answer else None

    def _agrees(self, said: Sequence[Message]) -> bool:
        """Whether a conversation is the record, or the beginning of one of them is the other."""
        return all(to_jsonable(one) == other for one, other in zip(said, self.record.messages, strict=False))

    def _problem_with(self, episode: Episode) -> str:
        """Why the score of the replayed episode is not one of the recorded episode; empty if it is."""
        said, recorded, stop = episode.as_member.messages, self.record.messages, self.record.stop
        if not self._agrees(said):
            return DIFFERENT
        if episode.result.failure is not None:
            return ""  # its score is missing, which is a result
        is_done = episode.stop == "done"
        if stop in ("env_error", "env_timeout") and len(said) >= len(recorded):
            return "" if is_done else "a failure of the environment had cut it off"
        if stop in ("max_turns", "truncated"):  # the environment would have gone on
            return DIFFERENT if is_done or len(said) < len(recorded) else ""
        return "" if is_done and len(said) == len(recorded) else DIFFERENT

    def rescored(self, episode: Episode | None) -> RescoredEpisode:
        """The score then, and that of the replayed episode, None if it could not be replayed."""
        record = self.record
        problem = self.problem if episode is None else self._problem_with(episode)
        result = None if episode is None or problem else episode.result
        failure = result.failure if result else None
        return RescoredEpisode(
            record.step,
            record.eval_phase,
            record.row_number,
            record.case_idx,
            record.score,
            result.score if result else None,
            problem,
            f"{failure.place} {failure.message}".strip() if failure else "",
            self.is_from_record and not problem,
            as_text(as_messages(record.prompt)[-1].get("content"))[:EXCERPT] if record.prompt else "",
            record.completion[:EXCERPT],
            record.environment,
        )


# -- the report


def report(episodes: Sequence[RescoredEpisode], most: int) -> dict[str, Any]:
    """What a rescoring found, as a JSON object: means before and after, for training and each scoring of the held-out
    cases, and of several environments for each; the `most` changed episodes, and what could not be scored again.

    Raises:
        EnvironmentFailed: today's scorer failed on all of them.
        RunFailed: none could be given to it.
    """
    failures = Counter(one.failure for one in episodes if one.failure).most_common()
    problems = Counter(one.problem for one in episodes if one.problem).most_common()
    if all(one.after is None for one in episodes):
        none = f"None of {len(episodes)} episodes could be scored again"
        if failures:
            raise EnvironmentFailed(f"{none}; {failures[0][1]} failed:\n{failures[0][0]}")
        raise RunFailed(f"{none}: {problems[0][0] if problems else 'the score is None'}")
    by_phase: dict[str, list[RescoredEpisode]] = {}
    for one in episodes:
        phase = f"held-out, {one.eval_phase.replace('_', ', ')}" if one.eval_phase else "training"
        by_phase.setdefault(f"{phase}, {one.environment}" if one.environment else phase, []).append(one)
    # scores that appeared or vanished come first
    changed = sorted((one for one in episodes if one.change), key=lambda one: abs(one.change), reverse=True)[:most]
    return {
        "episodes": len(episodes),
        "not_rescored": dict(problems),
        "failed": dict(failures),
        "scored_with_saved_rows": sum(one.is_from_record for one in episodes),
        "phases": {name: _phase(own) for name, own in by_phase.items()},
        "most_changed": [to_jsonable(asdict(one)) for one in changed],
    }


def _phase(episodes: Sequence[RescoredEpisode]) -> dict[str, Any]:
    """Counts, and the mean scores of the episodes that have one before and after."""
    rescored = [one for one in episodes if not one.problem]
    pairs = [(one.before, one.after) for one in rescored if one.before is not None and one.after is not None]
    return {
        "episodes": len(episodes),
        "compared": len(pairs),
        "mean_before": fmean(before for before, _ in pairs) if pairs else None,
        "mean_after": fmean(after for _, after in pairs) if pairs else None,
        "changed": sum(one.change != 0 for one in episodes),
        "unscored_before": sum(one.before is None for one in episodes),
        "unscored_after": sum(one.after is None for one in rescored),
    }


COLUMNS = ("episodes", "compared", "mean_before", "mean_after", "changed")


def show_report(console: Console, found: dict[str, Any]) -> None:
    """Print the report."""
    table = Table("", box=None, pad_edge=False, header_style="dim")
    for column in COLUMNS:
        table.add_column(column.removeprefix("mean_"), justify="right")
    for phase, counts in found["phases"].items():
        table.add_row(Text(escape_controls(phase)), *(_number(counts[column]) for column in COLUMNS))
    console.print(table)
    before, now = [sum(one[f"unscored_{end}"] for one in found["phases"].values()) for end in ("before", "after")]
    notes = [f"unscored: {before} before, {now} now"] * bool(before or now)
    notes += [f"{count} failed: {failure}" for failure, count in list(found["failed"].items())[:3]]
    notes += [f"not scored again: {count}: {problem}" for problem, count in found["not_rescored"].items()]
    if saved := found["scored_with_saved_rows"]:
        notes.append(f"{saved} episodes are of cases that are not in today's dataset: scored with their saved rows")
    for note in notes:
        show_text(console, note)
    for one in found["most_changed"]:
        scores = f"{_number(one['before'])} -> {_number(one['after'])}"
        names = filter(None, (f"step {one['step']}", one["eval_phase"], one["environment"]))
        show_heading(console, f"{', '.join(names)}, case {one['case']}: {scores}")
        for name, style in (("prompt", "dim"), ("answer", ""), ("failure", "")):
            if one[name]:
                show_text(console, f"{name}: {one[name]}", style)


def _number(value: float | None) -> str:
    """A score, or a count."""
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
