"""Applies today's scorer to the saved episodes of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from aitrain.environment.contract import Case, ScoreResult, Transcript, env_kind, scores_groups
from aitrain.environment.runner import EnvRunner, NoModel, score_groups, start_runner
from aitrain.environment.served_environment import ServedEnvironment
from aitrain.environment.session import Group, GroupMember
from aitrain.options.train import TrainConfig
from aitrain.rollout.event_loop import EventLoop
from aitrain.runs.json_values import as_text
from aitrain.runs.rollout_record import RolloutRecord, row_columns
from aitrain.runs.run_folder import to_jsonable
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.player import Play, Player
from aitrain.workbench.replay import Replay, problem_of

BATCH = 256
EXCERPT = 400
"""Characters that are kept of a prompt and an answer."""
SAME = 1e-9
"""Scores that differ by less are the same."""
INCOMPLETE = "another episode of its group could not be scored, and score_group compares them"


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
    def change(self) -> float | None:
        """By how much the score changed; None unless there are both."""
        return None if self.before is None or self.after is None or self.problem else self.after - self.before


@dataclass
class Rescorer:
    """Scores episodes again, batch by batch; multi-turn ones are replayed."""

    opened: OpenedEnvironment
    config: TrainConfig
    tokenizer: object
    _cases: dict[int, Case] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cases = {case.number: case for case in (*self.opened.cases, *self.opened.held_out)}
        self._kind = env_kind(self.opened.environment)

    def rescore(self, records: Iterable[RolloutRecord]) -> Iterator[RescoredEpisode]:
        """Each episode with today's score; the records of a group follow each other."""
        runner = start_runner(self.opened.environment, self.config)
        runner.offer(NoModel(), self.tokenizer)
        loop, player = EventLoop(), Player(self.opened.environment, self.config, runner)
        try:
            for batch in _batches(records):
                cases = [self._case(record) for record in batch]
                ready = [(record, case) for record, case in zip(batch, cases, strict=True) if isinstance(case, Case)]
                if self._kind == "score_episode":
                    results = [(result, "") for result in loop.run(_scored(runner, ready))]
                else:
                    results = _replayed(player, ready)
                if scores_groups(self.opened.environment):
                    results = loop.run(_with_groups(runner, batch, ready, results))
                found = iter(results)
                for record, case in zip(batch, cases, strict=True):
                    result, problem = next(found) if isinstance(case, Case) else (ScoreResult(None), case)
                    yield self._episode(record, result, problem)
        finally:
            player.close()
            loop.close()

    def _episode(self, record: RolloutRecord, result: ScoreResult, problem: str) -> RescoredEpisode:
        failure = result.failure
        known = self._known(record)
        return RescoredEpisode(
            record.step,
            record.eval_phase,
            record.row_number,
            record.case_idx,
            record.score,
            None if problem else result.score,
            problem,
            "" if failure is None or problem else f"{failure.place} {failure.message}".strip(),
            known is None and not problem,
            _last_text(record.prompt)[:EXCERPT],
            record.completion[:EXCERPT],
            record.environment,
        )

    def _known(self, record: RolloutRecord) -> Case | None:
        """Today's case of the record: the same row with the same prompt and, if it was saved, the same columns."""
        case = self._cases.get(-1 if record.row_number is None else record.row_number)
        if case is None or to_jsonable(case.prompt) != record.prompt:
            return None
        return case if row_columns(case.row) == record.row else None

    def _case(self, record: RolloutRecord) -> Case | str:
        """The case to score with, or why the episode cannot be scored again."""
        if problem := self._problem(record):
            return problem
        known = self._known(record)
        if known is not None:
            return known
        if isinstance(self.opened.environment, ServedEnvironment):
            return "its row is not in the dataset of the environment's server, which scores no other rows"
        if any(as_text(value).startswith("(left out: ") for value in record.row.values() if isinstance(value, str)):
            return "a column was too long to be saved, and the row is not in today's dataset"
        row = {**record.row, "prompt": record.prompt}
        return Case(record.case_idx, record.prompt, row, record.row_number or 0)

    def _problem(self, record: RolloutRecord) -> str:
        """Why the episode cannot be scored again, whatever its case is."""
        is_single = self._kind == "score_episode"
        has_answer = any(message.get("role") == "assistant" for message in record.messages)
        if not has_answer:
            return "it has no answer"
        if self._kind == "rollout":
            return "rollout plays its episodes itself, so that they cannot be replayed"
        if not is_single and record.seed is None:
            return "its seed is not in the record"
        if is_single and record.error is not None and record.error.place not in ("", "score_episode"):
            return "a failure of the environment had cut it off"
        return ""


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
    if batch:
        yield batch


Ready = Sequence[tuple[RolloutRecord, Case]]
"""Records with the cases that they are scored with."""
Result = tuple[ScoreResult, str]
"""Today's score, and why it does not count."""


async def _with_groups(
    runner: EnvRunner, batch: Sequence[RolloutRecord], ready: Ready, results: Sequence[Result]
) -> list[Result]:
    """The results after `score_group`, which needs all episodes of a group."""
    sizes, merged = Counter(map(_group_key, batch)), list(results)
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, (record, _) in enumerate(ready):
        groups.setdefault(_group_key(record), []).append(place)
    for key, places in groups.items():
        if len(places) < sizes[key] or any(results[place][1] for place in places):
            for place in places:
                merged[place] = ScoreResult(None), results[place][1] or INCOMPLETE
            continue
        texts = [_transcript(*ready[place]) for place in places]
        members = [
            GroupMember(text.content, text.text, text.messages, results[place][0])
            for text, place in zip(texts, places, strict=True)
        ]
        (scored,) = await score_groups(runner, [Group(ready[places[0]][1], members)])
        for place, result in zip(places, scored, strict=True):
            merged[place] = result, ""
    return merged


async def _scored(runner: EnvRunner, ready: Ready) -> list[ScoreResult]:
    """Scores of saved transcripts, by `score_episode`."""
    results, left = list[ScoreResult](), list(ready)
    while left:
        part = left[:1] if runner.plays_alone else left
        left = left[len(part) :]
        sessions = await runner.open([case for _, case in part], [record.seed or 0 for record, _ in part])
        results += await runner.score(sessions, [_transcript(record, case) for record, case in part])
        await runner.end(sessions)
    return results


def _transcript(record: RolloutRecord, case: Case) -> Transcript:
    if isinstance(record.prompt, str):
        return Transcript(case, "".join(as_text(message.get("content")) for message in record.messages[1:]))
    return Transcript(case, record.messages[len(record.prompt) :])


def _replayed(player: Player, ready: Ready) -> list[Result]:
    """Scores of episodes that were played again with the saved answers, each with why it does not count."""
    replays = [Replay(record) for record, _ in ready]
    plays = [Play(case, replay, record.seed or 0) for replay, (record, case) in zip(replays, ready, strict=True)]
    return [
        (ScoreResult(played.score, played.metrics, played.failure), problem_of(played, replay))
        for played, replay in zip(player.play(plays), replays, strict=True)
    ]


def _last_text(prompt: str | list[dict[str, object]]) -> str:
    return prompt if isinstance(prompt, str) else as_text(prompt[-1].get("content")) if prompt else ""
