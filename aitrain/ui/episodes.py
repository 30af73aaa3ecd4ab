"""Episodes as a page asks for them: filtered, searched, in groups, and one with all that was said."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NotRequired, TypedDict

from aitrain.runs.json_values import parse_object
from aitrain.runs.rollout_index import IndexEntry, RolloutIndex, excerpt, prompt_excerpt
from aitrain.runs.rollout_record import RolloutRecord, TranscriptMessage

ORDERS = ("training", "lowest", "highest", "mixed", "longest")
"""How groups are sorted: as they were made, by mean score, by how much their scores differ, by tokens."""
SEARCH_SECONDS = 15.0
MOST_HITS = 2_000


@dataclass(frozen=True)
class Query:
    """Which episodes; what is None or empty does not matter.

    `eval_phase` is `training`, `held-out`, or one scoring such as `before_sampled`; `case` is the number of a row, or
    where no row has that number, a `case_idx`; `failure` is a kind, or `any`.
    """

    eval_phase: str = ""
    step: int | None = None
    case: str = ""
    low: float | None = None
    high: float | None = None
    failure: str = ""
    stop: str = ""
    text: str = ""
    order: str = "training"

    def takes(self, entry: IndexEntry, by_case_idx: bool = False) -> bool:
        """Whether an episode is asked for, but for its text; `case` names the row, or its `case_idx`."""
        return (
            self._takes_phase(entry)
            and self.step in (None, entry.step)
            and self.case in ("", entry.case_idx if by_case_idx else entry.case)
            and self._takes_score(entry.score)
            and (not self.failure or entry.failure == self.failure or (self.failure == "any" and bool(entry.failure)))
            and self.stop in ("", entry.stop)
        )

    def _takes_phase(self, entry: IndexEntry) -> bool:
        kind = "held-out" if entry.eval_phase else "training"
        return self.eval_phase in ("", kind, entry.eval_phase)

    def _takes_score(self, score: float | None) -> bool:
        if self.low is None and self.high is None:
            return True
        low = -math.inf if self.low is None else self.low
        return score is not None and low <= score <= (math.inf if self.high is None else self.high)


@dataclass(frozen=True)
class Found:
    """Numbers of episodes, sorted as asked; incomplete where a search ended before it had seen everything."""

    numbers: list[int]
    is_complete: bool = True


def group_of(entry: IndexEntry) -> tuple[int, str, int, str]:
    """What an episode's group is known by; of held-out cases, the samples of one case in one scoring."""
    return entry.step, entry.eval_phase, entry.group, entry.case if entry.eval_phase else ""


def find(rollouts: RolloutIndex, query: Query) -> Found:
    """All episodes that a query asks for."""
    entries = rollouts.entries
    by_case_idx = query.case != "" and all(entry.case != query.case for entry in entries)
    numbers = [number for number, entry in enumerate(entries) if query.takes(entry, by_case_idx)]
    is_complete = True
    if query.text:
        hits = list(_searched(rollouts, numbers, query.text))
        is_complete = None not in hits
        numbers = [number for number in hits if number is not None]
    return Found(_sorted(entries, numbers, query.order), is_complete)


def _searched(rollouts: RolloutIndex, numbers: Sequence[int], text: str) -> Iterator[int | None]:
    """Those whose messages or error hold the text; None at the end when there were too many or it took too long.

    A record is parsed only when its bytes hold the text. Upper and lower case are the same for a to z.
    """
    needles = {json.dumps(text, ensure_ascii=ascii)[1:-1].encode(errors="replace").lower() for ascii in (False, True)}
    wanted, entries = _folded(text), rollouts.entries
    end, hits = time.monotonic() + SEARCH_SECONDS, 0
    raws = rollouts.each_raw(entries[number] for number in numbers)
    for number, (_, raw) in zip(numbers, raws, strict=True):
        if hits == MOST_HITS or (number % 256 == 0 and time.monotonic() > end):
            yield None
            return
        lowered = raw.lower()
        if any(needle in lowered for needle in needles) and wanted in _folded(_all_text(raw)):
            hits += 1
            yield number


def _folded(text: str) -> bytes:
    return text.encode(errors="replace").lower()


def _all_text(raw: bytes) -> str:
    record = RolloutRecord.from_json(parse_object(raw) or {})
    asked, said = record.transcript()
    parts = [text for message in (*asked, *said) for text in (message.text, *sum(message.calls, ()))]
    return "\n".join([*parts, record.error.message if record.error else ""])


def _sorted(entries: Sequence[IndexEntry], numbers: list[int], order: str) -> list[int]:
    if order not in ORDERS[1:]:
        return sorted(
            numbers, key=lambda number: (entries[number].step, entries[number].eval_phase, entries[number].group)
        )
    groups: dict[tuple[int, str, int, str], list[int]] = {}
    for number in numbers:
        groups.setdefault(group_of(entries[number]), []).append(number)
    ranked = sorted(groups.values(), key=lambda group: _rank([entries[number] for number in group], order))
    return [number for group in ranked for number in group]


def _rank(group: list[IndexEntry], order: str) -> tuple[bool, float]:
    if order == "longest":
        return False, -max(entry.tokens for entry in group)
    scores = [entry.score for entry in group if entry.score is not None]
    if not scores:
        return True, 0.0  # unscored groups last
    mean = sum(scores) / len(scores)
    return False, {"lowest": mean, "highest": -mean, "mixed": -sum((score - mean) ** 2 for score in scores)}[order]


# -- one page of a list


class EpisodeFacts(TypedDict):
    """What the page knows an episode by: its number `n` among all of the run, and the facts of its index entry."""

    n: int
    step: int
    eval_phase: str
    group: int
    case: str
    case_idx: str
    score: float | None
    advantage: float | None
    stop: str
    failure: str
    turns: int
    tokens: int


class EpisodeRow(EpisodeFacts):
    """An episode in a list, with the beginning of its prompt and of its last answer."""

    prompt: str
    answer: str


class EpisodePage(TypedDict):
    """Some rows of a list, how many the list has, and where the next page starts."""

    rows: list[EpisodeRow]
    total: int
    next: int | None
    is_complete: bool


def page_of(rollouts: RolloutIndex, found: Found, start: int, size: int = 48) -> EpisodePage:
    """The rows from `start` on, whole groups where they are not huge, and where the next page starts."""
    entries, numbers = rollouts.entries, found.numbers
    end = min(len(numbers), start + size)
    while start < end < min(len(numbers), start + 4 * size) and _are_together(entries, numbers[end - 1 : end + 1]):
        end += 1
    return {
        "rows": [_row(rollouts, number) for number in numbers[start:end]],
        "total": len(numbers),
        "next": end if end < len(numbers) else None,
        "is_complete": found.is_complete,
    }


def _are_together(entries: Sequence[IndexEntry], two: Sequence[int]) -> bool:
    return group_of(entries[two[0]]) == group_of(entries[two[1]])


def _row(rollouts: RolloutIndex, number: int) -> EpisodeRow:
    entry = rollouts.entries[number]
    record = rollouts.record(entry)
    return {
        **_facts(entry, number),
        "prompt": prompt_excerpt(record.prompt),
        "answer": excerpt(record.completion),
    }


def _facts(entry: IndexEntry, number: int) -> EpisodeFacts:
    return {
        "n": number,
        "step": entry.step,
        "eval_phase": entry.eval_phase,
        "group": entry.group,
        "case": entry.case,
        "case_idx": entry.case_idx,
        "score": entry.score,
        "advantage": entry.advantage,
        "stop": entry.stop,
        "failure": entry.failure,
        "turns": entry.turns,
        "tokens": entry.tokens,
    }


# -- one episode


@dataclass(frozen=True)
class Limit:
    """How much of an episode a page gets: characters of one text, messages at the beginning and at the end."""

    text: int
    first: int
    last: int


WHOLE = Limit(2_000_000, 20_000, 1_000)
"""More than this of one episode no browser should be given."""


class MessageView(TypedDict):
    """A message of a transcript; `length` where its text is cut, `calls` as [tool, arguments]."""

    role: str
    text: str
    length: NotRequired[int]
    name: NotRequired[str]
    calls: NotRequired[list[list[str]]]


class Skipped(TypedDict):
    """How many messages are left out of a transcript, after how many."""

    after: int
    count: int


class Transcript(EpisodeRow):
    """An episode with all that was said."""

    asked: list[MessageView]
    said: list[MessageView]
    skipped: Skipped | None
    error: dict[str, str]
    metrics: dict[str, float | None]
    seconds: float | None
    seed: str


def episode(rollouts: RolloutIndex, number: int, limit: Limit = WHOLE) -> Transcript:
    """An episode with all that was said; `skipped` messages are left out after the first ones."""
    entry = rollouts.entries[number]
    record = rollouts.record(entry)
    asked, said = record.transcript()
    left_out = max(0, len(said) - limit.first - limit.last)
    kept = [*said[: limit.first], *said[len(said) - limit.last :]] if left_out else said
    error = asdict(record.error) if record.error else {}
    return {
        **_facts(entry, number),
        "asked": [_view(message, limit.text) for message in asked[: limit.first]],
        "said": [_view(message, limit.text) for message in kept],
        "skipped": {"after": limit.first, "count": left_out} if left_out else None,
        "answer": excerpt(record.completion),
        "prompt": prompt_excerpt(record.prompt),
        "error": {name: text[: limit.text] for name, text in error.items()},
        "metrics": {name[:200]: value for name, value in list(record.metrics.items())[:100]},
        "seconds": record.seconds,
        "seed": "" if record.seed is None else str(record.seed),
    }


def _view(message: TranscriptMessage, most: int) -> MessageView:
    shown: MessageView = {"role": message.role, "text": message.text[:most]}
    if len(message.text) > most:
        shown["length"] = len(message.text)
    if message.name:
        shown["name"] = message.name
    if message.calls:
        shown["calls"] = [[name[:200], arguments[:most]] for name, arguments in message.calls[:100]]
    return shown
