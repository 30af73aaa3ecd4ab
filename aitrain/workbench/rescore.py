"""`aitrain env rescore`: applies today's scorer to the saved episodes of a run. Episodes of several turns are replayed
with the saved answers, and count if the environment says what it said then."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any

from rich.console import Console

from aitrain.environment.completion_parser import short
from aitrain.environment.contract import Case, as_messages, env_kind
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.environment.session import Message
from aitrain.errors import ConfigError, EnvironmentFailed, RunFailed
from aitrain.redaction import to_jsonable
from aitrain.rollout.episode import Episode
from aitrain.runs.records import RolloutRecord, row_columns
from aitrain.runs.rollout_index import prompt_excerpt
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.play import show_heading, show_text
from aitrain.workbench.player import Conversation, Player

BATCH = 256
EXCERPT = 400
"""Characters that are shown of an answer."""
DIFFERENT = "the environment or a tool answered differently, or had failed"


class SavedEpisode:
    """A policy that gives the answers of a record; with today's score, once they were replayed."""

    after: float | None = None
    """Today's score."""
    failure = ""
    """Why today's scorer gave no score."""
    problem = ""
    """Why it cannot be scored again; empty if it can."""

    def __init__(self, record: RolloutRecord, environment: object, known: Mapping[int, Case]) -> None:
        """`known` are today's cases, by their numbers."""
        self.record = record
        asked = len(as_messages(record.prompt))
        self.answers = [message for message in record.messages[asked:] if message.get("role") == "assistant"]
        number = -1 if record.row_number is None else record.row_number
        self.case = Case(record.case_idx, record.prompt, {**record.row, "prompt": record.prompt}, number)
        today = known.get(number)
        self.is_from_record = True
        """Whether its case is not in today's dataset, so that it is scored with the saved row."""
        if today and to_jsonable(today.prompt) == record.prompt and row_columns(today.row) == record.row:
            self.case, self.is_from_record = today, False
        if not self.answers:
            self.problem = "it has no answer"
        elif env_kind(environment) == "score_episode" and record.stop == "truncated":
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

    def take(self, replayed: Episode) -> None:
        """Take today's score of the replayed episode, if it is one of the recorded episode."""
        said, recorded, stop = replayed.as_member.messages, self.record.messages, self.record.stop
        failure, is_cut_off = replayed.result.failure, stop in ("max_turns", "truncated")
        may_go_on = is_cut_off or stop in ("env_error", "env_timeout")
        # the environment must be over where it had ended the episode, and go on where a limit had cut it off
        ends_alike = is_cut_off != (replayed.stop == "done")
        is_same = ends_alike and (len(said) == len(recorded) or (len(said) > len(recorded) and may_go_on))
        if self._agrees(said) and (is_same or failure):  # whose score is missing, which is a result
            self.after = replayed.result.score
            self.failure = f"{failure.place} {failure.message}".strip() if failure else ""
        else:
            self.problem = DIFFERENT

    @property
    def change(self) -> float:
        """By how much the score changed, to nine decimals; infinite if there is one only before or only after."""
        before, after = self.record.score, self.after
        if self.problem or before == after:
            return 0.0
        if before is None or after is None:
            return math.inf
        return round(after - before, 9)

    def to_json(self) -> dict[str, Any]:
        """Which episode it is, both scores, and the beginnings of its texts."""
        record = self.record
        texts = {"prompt": prompt_excerpt(record), "answer": short(record.completion, EXCERPT), "failure": self.failure}
        place = {name: getattr(record, name) for name in ("step", "eval_phase", "environment", "case_idx")}
        return {**place, "case": record.row_number, "before": record.score, "after": self.after, **texts}


def rescore(opened: OpenedEnvironment, records: Iterable[RolloutRecord], first: int = 0) -> Iterator[SavedEpisode]:
    """Each episode with today's score, batch by batch. In a run with several environments, `first` is the number of
    this one's first row among all.

    Raises:
        ConfigError: the environment scores groups of episodes together, or plays them itself.
    """
    known = {case.number + first: case for case in opened.all_cases}
    records, runner = iter(records), opened.runner
    with closing(Player(runner)) as player:
        if runner.scores_groups or runner.kind == "rollout":
            raise ConfigError(
                "rescore: saved episodes are replayed one by one, which neither score_group nor rollout allow"
            )
        while batch := [SavedEpisode(record, runner.environment, known) for record in islice(records, BATCH)]:
            ready = [one for one in batch if not one.problem]
            played = player.play([(one.case, one) for one in ready], [one.record.seed or 0 for one in ready])
            for one, replayed in zip(ready, played, strict=True):
                one.take(replayed)
            for one in batch:  # a run may have many
                one.record = replace(one.record, row={}, tools=[], messages=[], turns=[], rendered_prompt="")
                del one.answers, one.case
            yield from batch


# -- the report


def report(episodes: Sequence[SavedEpisode], most: int) -> dict[str, Any]:
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
    by_phase = defaultdict[str, list[SavedEpisode]](list)
    for one in episodes:
        phase = f"held-out, {one.record.eval_phase.replace('_', ', ')}" if one.record.eval_phase else "training"
        by_phase[", ".join(filter(None, (phase, one.record.environment)))].append(one)
    phases = dict[str, dict[str, Any]]()
    for phase, own in by_phase.items():
        scores = [(one.record.score, one.after) for one in own]
        pairs = [(before, after) for before, after in scores if before is not None and after is not None]
        before, after = map(fmean, zip(*pairs, strict=True)) if pairs else (None, None)
        phases[phase] = {
            "episodes": len(own),
            "compared": len(pairs),
            "mean_before": before,
            "mean_after": after,
            "changed": sum(one.change != 0 for one in own),
        }
    # scores that appeared or vanished come first
    changed = sorted((one for one in episodes if one.change), key=lambda one: abs(one.change), reverse=True)[:most]
    return {
        "episodes": len(episodes),
        "not_rescored": dict(problems),
        "failed": dict(failures),
        "scored_with_saved_rows": sum(one.is_from_record and not one.problem for one in episodes),
        "phases": phases,
        "most_changed": [to_jsonable(one.to_json()) for one in changed],
    }


def show_report(console: Console, found: dict[str, Any]) -> None:
    """Print the report."""
    for phase, one in found["phases"].items():
        means = f"{_number(one['mean_before'])} before, {_number(one['mean_after'])} now"
        counts = f"{one['changed']} of {one['episodes']} episodes changed, {one['compared']} compared"
        show_text(console, f"{phase}: {means}; {counts}")
    notes = [f"{count} failed: {failure}" for failure, count in list(found["failed"].items())[:3]]
    notes += [f"not scored again: {count}: {problem}" for problem, count in found["not_rescored"].items()]
    if saved := found["scored_with_saved_rows"]:
        notes.append(f"{saved} episodes are of cases that are not in today's dataset: scored with their saved rows")
    for note in notes:
        show_text(console, note)
    for one in found["most_changed"]:
        scores = f"{_number(one['before'])} -> {_number(one['after'])}"
        names = filter(None, (f"step {one['step']}", one["eval_phase"], one["environment"]))
        show_heading(console, f"{', '.join(names)}, case {one['case']}: {scores}")
        for name in ("prompt", "answer", "failure"):
            if one[name]:
                show_text(console, f"{name}: {one[name]}", "dim" if name == "prompt" else "")


def _number(score: float | None) -> str:
    return "none" if score is None else f"{score:.3f}"
