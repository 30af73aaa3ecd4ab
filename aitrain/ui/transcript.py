"""The episodes of a run as text for a terminal, with control characters escaped."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.text import Text

from aitrain.environment.completion_parser import short
from aitrain.runs.records import RolloutRecord, TranscriptMessage
from aitrain.runs.rollout_index import IndexEntry, RolloutIndex
from aitrain.ui.dashboard import number
from aitrain.ui.episodes import Query, find, tool_name
from aitrain.ui.output import escape_controls

INDENT = "    "
LONGEST_ROW = 300
"""Maximum characters of a case's row; `--json` has all of them."""


def worst(rollouts: RolloutIndex, query: Query) -> list[IndexEntry]:
    """Episodes that match a query, lowest score first, of equal ones the newest first; then those without a score."""
    return sorted(find(rollouts, query), key=lambda entry: (entry.score is None, entry.score or 0.0, -entry.step))


def episodes(rollouts: RolloutIndex, entries: Sequence[IndexEntry]) -> Iterator[Text]:
    """Episodes, group by group if they are adjacent: the prompt once, then the messages of each episode."""
    for _, together in groupby(entries, key=lambda entry: entry.group_key):
        group = list(together)
        records = [rollouts.record(entry) for entry in group]
        yield _heading(group[0])
        row = short(json.dumps(records[0].row, ensure_ascii=False), LONGEST_ROW) if records[0].row else ""
        for name, text in (("row", row), ("tools", ", ".join(map(tool_name, records[0].tools)))):
            if text:
                yield Text(f"  {name}: {escape_controls(text)}", style="dim")
        yield from messages_text(records[0].transcript()[0])
        for record in records:
            yield _facts(record)
            yield from messages_text(record.transcript()[1])
            if error := record.error:
                text = f"{error.place} {error.kind}: {error.message}"
                yield Text(INDENT + indented(text.strip()), style="red")
        yield Text()


def _heading(first: IndexEntry) -> Text:
    what = escape_controls(first.eval_phase).replace("_", ", ") or f"group {first.group}"
    what += "" if first.discarded is None else " (discarded)"
    named = f" (case_idx {first.case_idx})" if first.case_idx != first.case else ""
    case = escape_controls(f"{first.environment} {first.case}{named}".lstrip())
    return Text(f"step {first.step}, {what}, case {case}", "bold")


def _facts(record: RolloutRecord) -> Text:
    facts = ["" if record.advantage is None else f"advantage {record.advantage:+.2f}", escape_controls(record.stop)]
    facts += [f"{len(record.turns)} turns" if len(record.turns) > 1 else "", f"{record.tokens} tokens"]
    facts += [f"{escape_controls(name)} {value:.3g}" for name, value in record.metrics.items() if value is not None]
    return Text.assemble(f"  score {number(record.score)}", ("  " + ", ".join(filter(None, facts)), "dim"))


def messages_text(messages: Iterable[TranscriptMessage]) -> Iterator[Text]:
    """Each message with its role and its tool calls."""
    for message in messages:
        role = escape_controls(" ".join(filter(None, (message.role, message.name))))
        calls = "".join(f"\n-> {name}({arguments})" for name, arguments in message.calls)
        thought = (indented(message.thought + "\n"), "dim") if message.thought else ""
        yield Text.assemble(INDENT, (f"{role}: ", "cyan"), thought, indented(message.text + calls))


def indented(text: str) -> str:
    """The text with its own lines indented, below a first one that is."""
    return escape_controls(text).replace("\n", f"\n{INDENT}")
