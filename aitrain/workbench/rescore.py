"""`aitrain env rescore`: applies today's scorer to the saved episodes of a run. Episodes of several turns are replayed
with the saved answers, as long as the environment says what it said then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from aitrain.environment.contract import Case, ScoreResult, env_kind
from aitrain.environment.runner import NoModel, start_runner
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.environment.session import AssistantTurn, Message
from aitrain.environment.tool_call_parser import ToolCall
from aitrain.errors import EnvironmentFailed, RunFailed
from aitrain.options.train import TrainConfig
from aitrain.rollout.chat_format import ParsedTurn
from aitrain.runs.json_values import JsonObject, as_object, as_objects, as_text
from aitrain.runs.rollout_record import RolloutRecord, row_columns
from aitrain.runs.run_folder import to_jsonable
from aitrain.runs.statistics import weighted_mean
from aitrain.ui.escape_controls import escape_controls
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.player import Conversation, Play, PlayedEpisode, Player, as_messages
from aitrain.workbench.view import show_heading, show_text

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
    runner, known = start_runner(opened.environment, config), {case.number: case for case in opened.all_cases}
    runner.offer(NoModel(), tokenizer)
    with closing(Player(opened.environment, config, runner)) as player:
        for batch in _batches(records):
            replays = [Replay(record) for record in batch]
            plays = [replay.play(opened.environment, known) for replay in replays]
            ready = {place: play for place, play in enumerate(plays) if isinstance(play, Play)}
            played = dict(zip(ready, player.play(list(ready.values())), strict=True))
            problems = [play if isinstance(play, str) else "" for play in plays]
            results = [played[place].result if place in played else ScoreResult(None) for place in range(len(batch))]
            for place, episode in played.items():
                problems[place] = replays[place].problem(episode)
            if runner.scores_groups:
                groups: dict[tuple[object, ...], list[int]] = {}
                for place, record in enumerate(batch):
                    groups.setdefault(_group_key(record), []).append(place)
                whole = [places for places in groups.values() if not any(problems[place] for place in places)]
                scored = player.score_groups([[played[place] for place in places] for places in whole])
                for places, own in zip(whole, scored, strict=True):
                    for place, result in zip(places, own, strict=True):
                        results[place] = result
                for place in {place for places in groups.values() if places not in whole for place in places}:
                    problems[place] = problems[place] or INCOMPLETE
            for record, play, problem, result in zip(batch, plays, problems, results, strict=True):
                failure = result.failure
                yield RescoredEpisode(
                    record.step,
                    record.eval_phase,
                    record.row_number,
                    record.case_idx,
                    record.score,
                    None if problem else result.score,
                    problem,
                    "" if failure is None or problem else f"{failure.place} {failure.message}".strip(),
                    not problem and isinstance(play, Play) and known.get(play.case.number) is not play.case,
                    as_text(as_messages(record.prompt)[-1].get("content"))[:EXCERPT] if record.prompt else "",
                    record.completion[:EXCERPT],
                    record.environment,
                )


def _group_key(record: RolloutRecord) -> tuple[object, ...]:
    return record.step, record.eval_phase, record.group, record.row_number if record.eval_phase else None


def _batches(records: Iterable[RolloutRecord]) -> Iterator[list[RolloutRecord]]:
    """Batches of about BATCH records, of whole groups."""
    batch: list[RolloutRecord] = []
    for _, group in groupby(records, _group_key):
        batch += group
        if len(batch) >= BATCH:
            yield batch
            batch = []
    yield batch


@dataclass
class Replay:
    """A policy that gives the answers of a record; `is_different` if the environment's side is not the recorded one."""

    record: RolloutRecord
    is_different: bool = False

    def play(self, environment: object, known: Mapping[int, Case]) -> Play | str:
        """How to play it again, or why it cannot be scored again; `known` are today's cases."""
        record, kind = self.record, env_kind(environment)
        if not self.answers:
            return "it has no answer"
        if kind == "rollout":
            return "rollout plays its episodes itself, so that they cannot be replayed"
        if kind != "score_episode" and record.seed is None:
            return "its seed is not in the record"
        if kind == "score_episode" and record.stop == "truncated" and record.messages[-1].get("tool_calls"):
            return "it was cut off after a tool call"
        case = known.get(-1 if record.row_number is None else record.row_number)
        if not case or to_jsonable(case.prompt) != record.prompt or row_columns(case.row) != record.row:
            if isinstance(environment, ServedEnvironment):
                return "its row is not in the dataset of the environment's server, which scores no other rows"
            if any(isinstance(value, str) and value.startswith("(left out: ") for value in record.row.values()):
                return "a column was too long to be saved, and the row is not in today's dataset"
            row = {**record.row, "prompt": record.prompt}
            case = Case(record.case_idx, record.prompt, row, record.row_number or 0)
        return Play(case, self, record.seed or 0)

    @property
    def answers(self) -> int:
        """How many answers the record holds."""
        said = self.record.messages[len(as_messages(self.record.prompt)) :]
        return sum(message.get("role") == "assistant" for message in said)

    def __call__(self, said: Conversation) -> ParsedTurn | None:
        """The next recorded answer; None after the last one, and where the conversations part."""
        if said.answers >= self.answers:
            return None
        message, *after = self.record.messages[len(said.messages) :] or [{}]
        if not self.agrees(said.messages) or message.get("role") != "assistant":
            self.is_different = True
            return None
        calls = as_objects(message.get("tool_calls"))
        results = [as_text(result.get("content")) for result in after[: len(calls)] if result.get("role") == "tool"]
        results += [""] * (len(calls) - len(results))
        turns = [self._call(as_object(call.get("function")), text) for call, text in zip(calls, results, strict=True)]
        return message, AssistantTurn(as_text(message.get("content")), tuple(turns))

    def agrees(self, said: Sequence[Message]) -> bool:
        """Whether a conversation is the beginning of the record."""
        recorded = self.record.messages
        return len(said) <= len(recorded) and all(
            to_jsonable(one) == other for one, other in zip(said, recorded, strict=False)
        )

    def _call(self, function: JsonObject, result: str) -> ToolCall:
        """A recorded call. One that could not be read is recorded without arguments, and its result is the problem:
        such a call ran no tool, and must run none now."""
        name, arguments = as_text(function.get("name")), as_object(function.get("arguments"))
        tools = [as_object(tool.get("function", tool)) for tool in self.record.tools]
        has_required = {tool.get("name"): bool(as_object(tool.get("parameters")).get("required")) for tool in tools}
        if not arguments and result.startswith("error: ") and has_required.get(name, True):
            return ToolCall(name, None, result.removeprefix("error: "))
        return ToolCall(name, arguments)

    def problem(self, played: PlayedEpisode) -> str:
        """Why the replayed episode is not the recorded one; empty if it is, so that its score counts."""
        if played.failure is not None:
            return ""  # its score is missing, which is a result
        said, recorded, stop = played.member.messages, self.record.messages, self.record.stop
        is_whole = not self.is_different and len(played.replies) == self.answers and self.agrees(said[: len(recorded)])
        is_done = played.stop == "done"
        if is_whole and stop in ("env_error", "env_timeout"):
            return "" if is_done else "a failure of the environment had cut it off"
        if stop in ("max_turns", "truncated"):  # the environment would have gone on
            is_whole &= not is_done
        else:
            is_whole &= is_done and len(said) == len(recorded)
        return "" if is_whole else DIFFERENT


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
    phases: dict[str, list[RescoredEpisode]] = {}
    for one in episodes:
        phases.setdefault(one.eval_phase, []).append(one)
    # scores that appeared or vanished come first
    changed = sorted((one for one in episodes if one.change), key=lambda one: abs(one.change), reverse=True)[:most]
    names = ("step", "eval_phase", "environment", "case", "case_idx", "before", "after", "prompt", "answer", "failure")
    return {
        "episodes": len(episodes),
        "not_rescored": dict(problems),
        "failed": dict(failures),
        "scored_with_saved_rows": sum(one.is_from_record for one in episodes),
        "phases": {name or "training": _phase(own, shares if name else {}, shares) for name, own in phases.items()},
        "most_changed": [{name: _shown(getattr(one, name)) for name in names} for one in changed],
    }


def _shown(value: object) -> object:
    """A value for JSON: null if it is empty text."""
    return None if value == "" else to_jsonable(value)


def _phase(
    episodes: Sequence[RescoredEpisode], weights: Mapping[str, float], parts: Iterable[str] = ()
) -> dict[str, Any]:
    """Counts and mean scores, which are weighted means of the environments with these `weights`; and those of the
    environments in `parts`."""
    rescored = [one for one in episodes if not one.problem]
    compared = [one for one in rescored if one.before is not None and one.after is not None]
    by_env = {env: [one for one in compared if one.environment == env] for env in weights}
    weighted = [(weights[env], own) for env, own in by_env.items() if own] or [(1.0, compared)] * bool(compared)
    ends = ("before", "after")
    means = [weighted_mean([(w, fmean(getattr(one, end) for one in own)) for w, own in weighted]) for end in ends]
    counts = {
        "episodes": len(episodes),
        "compared": len(compared),
        "mean_before": means[0],
        "mean_after": means[1],
        "changed": sum(one.change != 0 for one in episodes),
        "unscored_before": sum(one.before is None for one in episodes),
        "unscored_after": sum(one.after is None for one in rescored),
    }
    own = {env: [one for one in episodes if one.environment == env] for env in parts if env}
    environments = {env: _phase(some, {}) for env, some in own.items() if some}
    return {**counts, "environments": environments} if environments else counts


def show_report(console: Console, found: dict[str, Any]) -> None:
    """Print the report."""
    lines: list[tuple[str, ...]] = [("", "episodes", "compared", "before", "after", "changed")]
    for phase, counts in found["phases"].items():
        name = phase if phase == "training" else f"held-out, {escape_controls(phase).replace('_', ', ')}"
        parts = {f"{name}, {escape_controls(env)}": part for env, part in counts.get("environments", {}).items()}
        for what, numbers in {name: counts, **parts}.items():
            means = [_number(numbers[end]).replace("none", "-") for end in ("mean_before", "mean_after")]
            lines.append(
                (what, f"{numbers['episodes']:,}", f"{numbers['compared']:,}", *means, f"{numbers['changed']:,}")
            )
    width = max(len(line[0]) for line in lines)
    for name, *columns in lines:
        text = f"{name:{width}}" + "".join(f"{column:>10}" for column in columns)
        console.print(Text(text, style="" if name else "dim"), soft_wrap=True)
    before, now = [sum(one[f"unscored_{end}"] for one in found["phases"].values()) for end in ("before", "after")]
    notes = [f"\nunscored: {before} before, {now} now"] if before or now else []
    notes += [f"  {count} failed: {failure}" for failure, count in list(found["failed"].items())[:3]]
    if problems := found["not_rescored"]:
        notes.append(f"\nnot scored again: {sum(problems.values())}")
        notes += [f"  {count}: {problem}" for problem, count in problems.items()]
    if saved := found["scored_with_saved_rows"]:
        gone = "are of cases that are not in today's dataset: they were scored with their saved rows"
        notes.append(f"\n{saved} episodes {gone}")
    for note in notes:
        show_text(console, note)
    if found["most_changed"]:
        console.print(Text("\nmost changed", style="bold"))
    for one in found["most_changed"]:
        named = f" (case_idx {one['case_idx']})" if str(one["case_idx"]) != str(one["case"]) else ""
        where = f"step {one['step']} {(one['eval_phase'] or '').replace('_', ', ')}".strip()
        where += f", {one['environment']}" if one["environment"] else ""
        scores = f"{_number(one['before'])} -> {_number(one['after'])}"
        show_heading(console, f"{where}, case {one['case']}{named}: {scores}")
        for name, style in (("prompt", "dim"), ("answer", ""), ("failure", "")):
            if one[name]:
                show_text(console, f"{name}: {one[name]}", style)


def _number(score: float | None) -> str:
    return "none" if score is None else f"{score:.3f}"
