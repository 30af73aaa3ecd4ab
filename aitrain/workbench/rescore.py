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
from aitrain.environment.contract import Case
from aitrain.environment.rollout_session import is_served
from aitrain.environment.runner import EnvRunner
from aitrain.environment.session import Message
from aitrain.errors import ConfigError, EnvironmentFailed
from aitrain.redaction import to_jsonable
from aitrain.rollout.episode import LIMITS, Episode
from aitrain.runs.records import RolloutRecord, row_columns
from aitrain.runs.rollout_index import prompt_excerpt
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.play import show_heading, show_text
from aitrain.workbench.player import Conversation, Player

BATCH = 256
MOST_PROBLEMS = 5
"""Most frequent reasons that are shown."""
EXCERPT = 400
"""Characters that are shown of an answer."""
DIFFERENT = "the environment or a tool answered differently, or had failed"


class SavedEpisode:
    """A policy that gives the answers of a record; with today's score, once they were replayed."""

    after: float | None = None
    """Today's score."""
    problem = ""
    """Why it is not scored again, or why today's scorer failed; empty if it is."""

    def __init__(self, record: RolloutRecord, runner: EnvRunner, known: Mapping[int | None, Case]) -> None:
        """`known` are today's cases, by their numbers."""
        self.record, today = record, known.get(record.row_number)
        if today and (to_jsonable(today.prompt) != record.prompt or row_columns(today.row) != record.row):
            today = None
        self.is_from_record = today is None
        """Whether its case is not in today's dataset, so that it is scored with the saved row."""
        self.case = today or Case(record.case_idx, record.prompt, {**record.row, "prompt": record.prompt})
        if not record.turns:
            self.problem = "it has no answer"
        elif runner.kind == "score_episode" and record.stop == "truncated":
            self.problem = "it was cut off after a tool call"
        elif self.is_from_record and is_served(runner.environment):
            self.problem = "its row is not in the dataset of the environment's server, which scores no other rows"
        elif self.is_from_record and any(str(value).startswith("(left out: ") for value in record.row.values()):
            self.problem = "a column was too long to be saved, and the row is not in today's dataset"

    def __call__(self, said: Conversation) -> Message | None:
        """The answer that follows in the record; None after the last one, and where the conversations part."""
        following = self.record.messages[len(said.messages) :][:1] if self._agrees(said.messages) else []
        return following[0] if following and following[0].get("role") == "assistant" else None

    def _agrees(self, said: Sequence[Message]) -> bool:
        """Whether a conversation is the record, or the beginning of one of them is the other."""
        return all(to_jsonable(one) == other for one, other in zip(said, self.record.messages, strict=False))

    def take(self, replayed: Episode) -> None:
        """Take today's score of the replayed episode, if it is one of the recorded episode."""
        said, failure = replayed.conversation, replayed.result.failure
        # the environment must be over where it had ended the episode, and go on where a limit had cut it off
        ends_alike = (self.record.stop in LIMITS) != (replayed.stop == "done")
        is_whole = ends_alike and len(said) >= len(self.record.messages)
        if not self._agrees(said) or not (is_whole or failure):
            self.problem = DIFFERENT
        elif failure:
            self.problem = f"{failure.place} {failure.message}".strip()
        else:
            self.after = replayed.result.score

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
        texts = {"prompt": prompt_excerpt(record), "answer": short(record.completion, EXCERPT)}
        place = {name: getattr(record, name) for name in ("step", "eval_phase", "environment", "case_idx")}
        return {**place, "case": record.row_number, "before": record.score, "after": self.after, **texts}


def rescore(opened: OpenedEnvironment, records: Iterable[RolloutRecord], first: int = 0) -> Iterator[SavedEpisode]:
    """Each episode with today's score, batch by batch. In a run with several environments, `first` is the number of
    this one's first row among all.

    Raises:
        ConfigError: the environment scores groups of episodes together, or plays them itself.
    """
    known: dict[int | None, Case] = {case.number + first: case for case in opened.all_cases}
    records, runner = iter(records), opened.runner
    with closing(Player(runner)) as player:
        if runner.scores_groups or runner.kind == "rollout":
            raise ConfigError(
                "rescore: saved episodes are replayed one by one, which neither score_group nor rollout allow"
            )
        while batch := [SavedEpisode(record, runner, known) for record in islice(records, BATCH)]:
            ready = [one for one in batch if not one.problem]
            played = player.play([(one.case, one) for one in ready], [one.record.seed or 0 for one in ready])
            for one, replayed in zip(ready, played, strict=True):
                one.take(replayed)
            for one in batch:  # a run may have many
                first_message = one.record.messages[:1]
                one.record = replace(one.record, row={}, tools=[], messages=first_message, rendered_prompt="")
                del one.case
            yield from batch


# -- the report


def report(episodes: Sequence[SavedEpisode], most: int) -> dict[str, Any]:
    """What a rescoring found, as a JSON object: means before and after, for training and each scoring of the held-out
    cases, and of several environments for each; the `most` changed episodes, and what could not be scored again.

    Raises:
        EnvironmentFailed: today's scorer gave none of them a score.
    """
    problems = Counter(one.problem or "the score is None" for one in episodes if one.after is None).most_common()
    if all(one.after is None for one in episodes):
        why, count = problems[0]
        raise EnvironmentFailed(f"None of {len(episodes)} episodes could be scored again; {count}: {why}")
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
    for problem, count in list(found["not_rescored"].items())[:MOST_PROBLEMS]:
        show_text(console, f"not scored again: {count}: {problem}")
    if saved := found["scored_with_saved_rows"]:
        show_text(console, f"{saved} episodes are scored with their saved rows, which today's dataset lacks")
    for one in found["most_changed"]:
        scores = f"{_number(one['before'])} -> {_number(one['after'])}"
        names = filter(None, (f"step {one['step']}", one["eval_phase"], one["environment"]))
        show_heading(console, f"{', '.join(names)}, case {one['case']}: {scores}")
        show_text(console, f"prompt: {one['prompt']}", "dim")
        show_text(console, f"answer: {one['answer']}")


def _number(score: float | None) -> str:
    return "none" if score is None else f"{score:.3f}"
