"""`aitrain env rescore`: applies today's scorer to the saved episodes of a run. Episodes of several turns are replayed
with the saved answers, and count if the environment says what it said then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain, groupby, repeat
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from aitrain.environment.completion_parser import ToolCall
from aitrain.environment.contract import Case, ScoreResult, as_messages, env_kind
from aitrain.environment.runner import AbsentModel
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.environment.session import AssistantTurn, Message
from aitrain.errors import EnvironmentFailed, RunFailed
from aitrain.options.train import TrainConfig
from aitrain.redaction import to_jsonable
from aitrain.rollout.chat_format import ParsedTurn
from aitrain.rollout.episode import Episode
from aitrain.runs.held_out import grouped
from aitrain.runs.json_values import as_object, as_objects, as_text
from aitrain.runs.records import RolloutRecord, prompt_key, row_columns
from aitrain.runs.statistics import ScoredEnv, mean_score
from aitrain.ui.output import escape_controls
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.play import show_heading, show_text
from aitrain.workbench.player import Conversation, Player

BATCH = 256
EXCERPT = 400
"""Characters that are kept of a prompt and an answer."""
SAME = 1e-9
"""Scores that differ by less are the same."""
INCOMPLETE = "another episode of its group could not be scored, and score_group compares them"
DIFFERENT = "the environment answered differently"


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
    prompt_key: str = ""
    """The same for cases with an equal prompt."""

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
    """Each episode with today's score, batch by batch; the records of a group follow each other."""
    known = {case.number: case for case in opened.all_cases}
    with closing(Player(opened.environment, config)) as player:
        player.runner.offer(AbsentModel(why="saved episodes are scored without one"), tokenizer)
        for groups in _batches(records):
            replays = [[Replay(record, opened.environment, known) for record in group] for group in groups]
            ready = [replay for group in replays for replay in group if not replay.problem]
            seeds = [replay.record.seed or 0 for replay in ready]
            played = player.play([(replay.case, replay) for replay in ready], seeds)
            for replay, episode in zip(ready, played, strict=True):
                replay.end(episode)
            if player.runner.scores_groups:
                _score_groups(player, replays)
            yield from (replay.rescored for group in replays for replay in group)


def _score_groups(player: Player, groups: Sequence[Sequence[Replay]]) -> None:
    incomplete = [group for group in groups if any(replay.problem for replay in group)]
    whole = [group for group in groups if group not in incomplete]
    for replay in chain(*incomplete):
        replay.problem = replay.problem or INCOMPLETE
    scored = player.score_groups([[one.episode for one in group if one.episode] for group in whole])
    for replay, result in zip(chain(*whole), chain(*scored), strict=True):
        replay.result = result


def _batches(records: Iterable[RolloutRecord]) -> Iterator[list[list[RolloutRecord]]]:
    """Batches of about BATCH records, in whole groups."""

    def group_of(record: RolloutRecord) -> tuple[object, ...]:
        return record.step, record.eval_phase, record.group, record.row_number if record.eval_phase else None

    batch: list[list[RolloutRecord]] = []
    for _, group in groupby(records, group_of):
        batch.append(sorted(group, key=lambda record: record.sample or 0))  # processes took turns
        if sum(map(len, batch)) >= BATCH:
            yield batch
            batch = []
    yield batch


class Replay:
    """A policy that gives the answers of a record."""

    def __init__(self, record: RolloutRecord, environment: object, known: Mapping[int, Case]) -> None:
        """`known` are today's cases, by their numbers."""
        self.record = record
        self.episode: Episode | None = None
        self.result = ScoreResult(None)
        self.turns = list(self._turns())
        case = known.get(-1 if record.row_number is None else record.row_number)
        is_known = case and to_jsonable(case.prompt) == record.prompt and row_columns(case.row) == record.row
        row = {**record.row, "prompt": record.prompt}
        saved = Case(record.case_idx, record.prompt, row, record.row_number or 0)
        self.case = case if case and is_known else saved
        kind = env_kind(environment)
        self.problem = ""
        """Why the record cannot be scored again; empty if it can."""
        if not self.turns:
            self.problem = "it has no answer"
        elif kind == "rollout":
            self.problem = "rollout plays its episodes itself, so that they cannot be replayed"
        elif kind == "score_episode" and record.stop == "truncated" and record.messages[-1].get("tool_calls"):
            self.problem = "it was cut off after a tool call"
        elif self.case is saved and isinstance(environment, ServedEnvironment):
            self.problem = "its row is not in the dataset of the environment's server, which scores no other rows"
        elif self.case is saved and any(str(value).startswith("(left out: ") for value in record.row.values()):
            self.problem = "a column was too long to be saved, and the row is not in today's dataset"
        self.is_from_record = self.case is saved

    def _turns(self) -> Iterator[ParsedTurn]:
        """The recorded answers. A call that could not be read is recorded without arguments, and its result is the
        problem: such a call ran no tool, and must run none now."""
        messages = self.record.messages
        tools = [as_object(tool.get("function", tool)) for tool in self.record.tools]
        has_required = {tool.get("name"): bool(as_object(tool.get("parameters")).get("required")) for tool in tools}
        for place in range(len(as_messages(self.record.prompt)), len(messages)):
            if messages[place].get("role") != "assistant":
                continue
            calls, results = list[ToolCall](), chain(messages[place + 1 :], repeat({}))
            for call, after in zip(as_objects(messages[place].get("tool_calls")), results, strict=False):
                function, result = as_object(call.get("function")), ""
                if after.get("role") == "tool":
                    result = as_text(after.get("content"))
                name, arguments = as_text(function.get("name")), as_object(function.get("arguments"))
                is_wrong = not arguments and result.startswith("error: ") and has_required.get(name, True)
                problem = result.removeprefix("error: ") if is_wrong else ""
                calls.append(ToolCall(name, None if is_wrong else arguments, problem))
            yield messages[place], AssistantTurn(as_text(messages[place].get("content")), tuple(calls))

    def __call__(self, said: Conversation) -> ParsedTurn | None:
        """The next recorded answer; None after the last one, and where the conversations part."""
        has_answer = said.answers < len(self.turns) and self._agrees(said.messages)
        return self.turns[said.answers] if has_answer else None

    def _agrees(self, said: Sequence[Message]) -> bool:
        """Whether a conversation is the record, or the beginning of one of them is the other."""
        return all(to_jsonable(one) == other for one, other in zip(said, self.record.messages, strict=False))

    def end(self, episode: Episode) -> None:
        """Take the score of the replayed episode, if it is the recorded one."""
        self.episode, self.result = episode, episode.result
        said, recorded, stop = episode.as_member.messages, self.record.messages, self.record.stop
        if not self._agrees(said):
            self.problem = DIFFERENT
            return
        if episode.result.failure is not None:
            return  # its score is missing, which is a result
        is_done = episode.stop == "done"
        if len(said) < len(recorded):
            self.problem = DIFFERENT
        elif stop in ("env_error", "env_timeout"):
            self.problem = "" if is_done else "a failure of the environment had cut it off"
        elif stop in ("max_turns", "truncated"):  # the environment would have gone on
            self.problem = DIFFERENT if is_done else ""
        elif not is_done or len(said) > len(recorded):
            self.problem = DIFFERENT

    @property
    def rescored(self) -> RescoredEpisode:
        """The scores then and now."""
        record, failure = self.record, self.result.failure
        return RescoredEpisode(
            record.step,
            record.eval_phase,
            record.row_number,
            record.case_idx,
            record.score,
            None if self.problem else self.result.score,
            self.problem,
            "" if failure is None or self.problem else f"{failure.place} {failure.message}".strip(),
            self.is_from_record and not self.problem,
            as_text(as_messages(record.prompt)[-1].get("content"))[:EXCERPT] if record.prompt else "",
            record.completion[:EXCERPT],
            record.environment,
            prompt_key(record.prompt),
        )


# -- the report


def report(episodes: Sequence[RescoredEpisode], most: int, shares: Mapping[str, float]) -> dict[str, Any]:
    """What a rescoring found, as a JSON object: means before and after, the `most` changed episodes, and what could not
    be scored again. `shares` are those of the environments in the held-out scores, if there are several.

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
        by_phase.setdefault(one.eval_phase, []).append(one)
    # scores that appeared or vanished come first
    changed = sorted((one for one in episodes if one.change), key=lambda one: abs(one.change), reverse=True)[:most]
    return {
        "episodes": len(episodes),
        "not_rescored": dict(problems),
        "failed": dict(failures),
        "scored_with_saved_rows": sum(one.is_from_record for one in episodes),
        "phases": {name or "training": _phase(own, shares if name else {}) for name, own in by_phase.items()},
        "most_changed": [to_jsonable(asdict(one)) for one in changed],
    }


def _phase(episodes: Sequence[RescoredEpisode], weights: Mapping[str, float]) -> dict[str, Any]:
    """Counts and mean scores; of held-out cases, they are made as those of the run, with these `weights` of the
    environments."""
    rescored = [one for one in episodes if not one.problem]
    compared = [one for one in rescored if one.before is not None and one.after is not None]
    keys: dict[str, dict[str, str]] = {}
    for one in compared:
        keys.setdefault(one.environment, {})[f"{one.environment}/{one.case}"] = one.prompt_key
    mixture = tuple(ScoredEnv(env, weights.get(env, 1.0), None, own) for env, own in keys.items())

    def mean(scored: Sequence[tuple[str, float]]) -> float | None:
        if episodes[0].eval_phase:
            return mean_score(grouped(scored), mixture)
        return fmean(score for _, score in scored) if scored else None

    means = [
        mean([(f"{one.environment}/{one.case}", getattr(one, end)) for one in compared]) for end in ("before", "after")
    ]
    return {
        "episodes": len(episodes),
        "compared": len(compared),
        "mean_before": means[0],
        "mean_after": means[1],
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
        name = phase if phase == "training" else f"held-out, {phase.replace('_', ', ')}"
        table.add_row(Text(escape_controls(name)), *(_number(counts[column]) for column in COLUMNS))
    console.print(table)
    before, now = [sum(one[f"unscored_{end}"] for one in found["phases"].values()) for end in ("before", "after")]
    notes = [f"\nunscored: {before} before, {now} now"] * bool(before or now)
    notes += [f"  {count} failed: {failure}" for failure, count in list(found["failed"].items())[:3]]
    notes += [f"not scored again: {count}: {problem}" for problem, count in found["not_rescored"].items()]
    if saved := found["scored_with_saved_rows"]:
        notes.append(f"{saved} episodes are of cases that are not in today's dataset: scored with their saved rows")
    for note in notes:
        show_text(console, note)
    if found["most_changed"]:
        console.print(Text("\nmost changed", style="bold"))
    for one in found["most_changed"]:
        where = ", ".join(
            filter(None, (f"step {one['step']}", one["eval_phase"].replace("_", ", "), one["environment"]))
        )
        scores = f"{_number(one['before'])} -> {_number(one['after'])}"
        show_heading(console, f"{where}, case {one['case']}: {scores}")
        for name, style in (("prompt", "dim"), ("answer", ""), ("failure", "")):
            if one[name]:
                show_text(console, f"{name}: {one[name]}", style)


def _number(value: float | None) -> str:
    """A score, or a count."""
    return "none" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
