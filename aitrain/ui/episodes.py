"""Episodes for the page: filtered, searched, in groups, a sample of them, and one with its whole conversation; and the
cases of a run, each with its first and its last score."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from statistics import fmean
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from aitrain.environment.completion_parser import short
from aitrain.runs.held_out import grouped
from aitrain.runs.json_values import JsonObject, as_object, as_text
from aitrain.runs.records import RolloutRecord
from aitrain.runs.rollout_index import EXCERPT, IndexEntry, RolloutIndex, prompt_excerpt
from aitrain.ui.overview import evenly

OF_A_PLACE = ("number", "file", "offset", "length")
"""Fields of the index that say where a record is, which no page shows."""
MOST_EPISODES = 2_000
MOST_BYTES = 8_000_000
"""Maximum bytes of the records that a page holds."""


@dataclass(frozen=True, config=ConfigDict(str_max_length=1000, allow_inf_nan=False))
class Query:
    """A filter of episodes; fields that are None or empty match all.

    `eval_phase` is `training`, `held-out`, or one scoring such as `before_sampled`; `case` is a row number, or if no
    row has that number, a `case_idx`; `failure` is a kind, or `any`.
    """

    eval_phase: str = ""
    step: int | None = None
    case: str = ""
    low: float | None = None
    high: float | None = None
    failure: str = ""
    stop: str = ""
    text: str = ""

    def takes(self, entry: IndexEntry, by_case_idx: bool = False) -> bool:
        """Whether an episode matches all fields but `text`; `case` is a row number, or with `by_case_idx` a name."""
        return (
            self.eval_phase in ("", "held-out" if entry.eval_phase else "training", entry.eval_phase)
            and self.step in (None, entry.step)
            and self.case in ("", entry.case_idx if by_case_idx else entry.case)
            and (self.low is None or (entry.score is not None and entry.score >= self.low))
            and (self.high is None or (entry.score is not None and entry.score <= self.high))
            and self.failure in ("", entry.failure, "any" if entry.failure else "")
            and self.stop in ("", entry.stop)
        )


def find(rollouts: RolloutIndex, query: Query) -> list[IndexEntry]:
    """All episodes that match a query, group by group, in the order of the training. Upper and lower case of its text
    are equal for a to z."""
    entries, text = rollouts.entries, query.text
    forms = {json.dumps(text, ensure_ascii=ascii)[1:-1].encode(errors="replace").lower() for ascii in (False, True)}
    by_case_idx = all(entry.case != query.case for entry in entries)
    found = sorted(
        (entry for entry in entries if query.takes(entry, by_case_idx)),
        key=lambda entry: (entry.step, entry.eval_phase, entry.group or 0, len(entry.case), entry.case),
    )

    def holds(entry: IndexEntry) -> bool:
        line = rollouts.raw(entry).lower()
        may_hold = any(form in line for form in forms)  # most records need not be parsed
        return may_hold and text.lower() in _said(rollouts.record(entry)).lower()

    return list(filter(holds, found)) if text else found


def _said(record: RolloutRecord) -> str:
    """The messages of an episode with their thoughts and calls, and its error."""
    messages = chain(*record.transcript())
    texts = [text for one in messages for text in (one.text, one.thought, *chain(*one.calls))]
    return "\n".join([*texts, record.error.message if record.error else ""])


# -- a sample for report.html


def choose(entries: Sequence[IndexEntry]) -> list[IndexEntry]:
    """The episodes that a report holds, in the order in which they were made: of a large run a sample, a quarter of it
    held-out cases before and after, the rest groups of all kinds, both evenly spread. Groups are not split, as an
    advantage has no meaning without the group.
    """
    most = min(MOST_EPISODES, MOST_BYTES * len(entries) // max(1, sum(entry.length for entry in entries)))
    if len(entries) <= most:
        return list(entries)
    cases = grouped(
        ((entry.eval_phase.endswith("greedy"), entry.case), entry)
        for entry in entries
        if entry.eval_phase.startswith(("before", "after"))
    )
    groups = grouped((entry.group_key, entry) for entry in entries)
    chosen = {*_spread(cases, most // 4), *_spread(groups, most * 3 // 4)}
    return sorted(chosen, key=lambda entry: entry.number)


def _spread(groups: Mapping[Any, list[IndexEntry]], most: int) -> Iterator[IndexEntry]:
    """The members of evenly spread groups, about `most` together."""
    size = fmean(map(len, groups.values())) if groups else 1
    return chain.from_iterable(evenly(list(groups.values()), max(2, int(most / size))))


# -- one page of a list


def page_of(rollouts: RolloutIndex, found: Sequence[IndexEntry], start: int, size: int = 48) -> JsonObject:
    """About `size` rows from `start` on, up to the end of a group, and the start of the next page."""
    end = min(len(found), start + size)
    while start < end < len(found) and found[end - 1].group_key == found[end].group_key:
        end += 1
    return {
        "rows": [_row(entry, rollouts.record(entry)) for entry in found[start:end]],
        "total": len(found),
        "next": end if end < len(found) else None,
    }


def _row(entry: IndexEntry, record: RolloutRecord) -> JsonObject:
    """An episode in a list: its number in the run, its fields, and excerpts of its prompt and its answer."""
    return {
        "n": entry.number,
        **{name: value for name, value in asdict(entry).items() if name not in OF_A_PLACE},
        "prompt": prompt_excerpt(record),
        "answer": short(record.completion, EXCERPT),
    }


# -- one episode


def episode(rollouts: RolloutIndex, entry: IndexEntry) -> JsonObject:
    """An episode with its case's row, its tools and its messages."""
    record = rollouts.record(entry)
    holder = rollouts.rendered.get(entry.group_key)  # the episode of the group that has the rendered prompt
    asked, said = (list(map(asdict, messages)) for messages in record.transcript())
    return {
        **_row(entry, record),
        "row": [{"name": name, "text": _as_shown(value)} for name, value in record.row.items()],
        "rendered": rollouts.record(holder).rendered_prompt if holder else "",
        "tools": [{"name": tool_name(tool), "text": _as_shown(tool)} for tool in record.tools],
        "asked": asked,
        "said": said,
        "error": asdict(record.error) if record.error else {},
        "metrics": dict(record.metrics),
        "seconds": record.seconds,
    }


def _as_shown(value: object) -> str:
    """Text unchanged; other values as JSON, on one line if it is short."""
    if isinstance(value, str):
        return value
    line = json.dumps(value, ensure_ascii=False)
    return line if len(line) <= 80 else json.dumps(value, indent=2, ensure_ascii=False)


def tool_name(schema: JsonObject) -> str:
    """The name in a tool's schema, empty without one."""
    return as_text(as_object(schema.get("function", schema)).get("name"))


# -- cases


def case_rows(rollouts: RolloutIndex) -> list[dict[str, Any]]:
    """A row for each case, in the order of their first episodes; without greedy scorings, which are no samples of the
    policy. Scores are None if nothing was scored; `change` is None, too, if the case was played at one time only."""
    sampled = (entry for entry in rollouts.entries if not entry.eval_phase.endswith("greedy"))
    rows = list[dict[str, Any]]()
    for (is_held_out, case), entries in grouped(((entry.is_held_out, entry.case), entry) for entry in sampled).items():
        visits = grouped(
            ((entry.step, entry.eval_phase.startswith("after"), entry.group or 0), entry.score) for entry in entries
        )
        ends = [[score for score in visits[end] if score is not None] for end in (min(visits), max(visits))]
        first, last = (fmean(scores) if scores else None for scores in ends)
        rows.append(
            {
                "case": case,
                "case_idx": entries[0].case_idx,
                "is_held_out": is_held_out,
                "prompt": rollouts.prompts.get((is_held_out, case), ""),
                "first": first,
                "last": last,
                "change": None if first is None or last is None or len(visits) < 2 else last - first,
                "environment": entries[0].environment,
            }
        )
    return rows


def cases_json(rollouts: RolloutIndex, most: int) -> JsonObject:
    """The cases for a page: at most `most`, the held-out ones and those whose score changed most."""
    rows = sorted(case_rows(rollouts), key=lambda row: (not row["is_held_out"], -abs(row["change"] or 0.0)))
    return {"rows": rows[:most], "count": len(rows)}
