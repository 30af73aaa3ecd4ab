"""A run and its episodes as text for a terminal, with control characters escaped."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from aitrain.runs.rollout_index import IndexEntry, RolloutIndex
from aitrain.runs.rollout_record import RolloutRecord, TranscriptMessage
from aitrain.runs.verdict import VERDICT_STYLES, verdict_sentence
from aitrain.ui.dashboard import brief, number
from aitrain.ui.duration import duration
from aitrain.ui.episodes import Query, find, tool_name
from aitrain.ui.escape_controls import escape_controls
from aitrain.ui.summary import EpisodeCounts, count, summary
from aitrain.ui.terminal import reward_curve, score_table

GOOD, MIDDLE, BAD = "green", "yellow", "red"
INDENT = 4
"""Columns before a message."""
LONGEST_ROW = 300
"""Maximum characters of a case's row."""


def worst(rollouts: RolloutIndex, query: Query) -> list[int]:
    """Scored episodes, lowest score first: those of the query; by default of the newest sampled scoring of held-out
    cases, else of the last step."""
    entries = rollouts.entries
    if not query.eval_phase and query.step is None and not query.case:
        phases = [entry.eval_phase for entry in entries if entry.eval_phase and not entry.eval_phase.endswith("greedy")]
        last = max((entry.step for entry in entries), default=0)
        query = Query(eval_phase=phases[-1]) if phases else Query(eval_phase="training", step=last)
    found = [number for number in find(rollouts, query).numbers if entries[number].score is not None]
    return sorted(found, key=lambda number: entries[number].score or 0.0)


# -- the run


def overview(folder: Path, rollouts: RolloutIndex, console: Console) -> Iterator[RenderableType]:
    """Title, scores, findings, reward curve and episode counts of a run."""
    found = summary(folder, rollouts)
    options, result = {row["name"]: row["value"] for row in found["options"]}, found["result"]
    steps, seconds = result["steps"] or found["step"], result["seconds"]
    extent = ("" if steps is None else f"  {steps:.0f} steps") + (f" in {duration(seconds)}" if seconds else "")
    yield Text.assemble((escape_controls(found["name"]), "bold"), f"  {escape_controls(found['status'])}{extent}")
    counts = {"cases": result["train_cases"], "held out": result["eval_cases"]}
    parts = [options.get("model"), found["environment"].get("class")]
    parts += [f"{count} {name}" for name, count in counts.items() if count]
    yield Text(escape_controls(", ".join(str(part) for part in parts if part)), style="dim")
    if later := _of_the_same_name(folder):
        yield Text(escape_controls(f"this is {folder}; started later with its name: {', '.join(later)}"), style="dim")
    yield Text()
    yield score_table(found["scores"])
    if verdict := found["verdict"]:
        yield Text(verdict_sentence(found["scores"]["sampled"]["change"]), style=VERDICT_STYLES[verdict])
    if chosen := found["selection"]:
        text = f"model/ has the weights of step {chosen['step']}, whose score of {number(chosen['score'])} was the best"
        yield Text(f"{text} of {chosen['scorings']}; after: its score with new samples", style="dim")
    for finding in found["findings"]:
        yield Text(f"step {finding['step']}: {escape_controls(finding['text'])}", style=MIDDLE)
    rewards = [value for value in found["curves"]["series"].get("reward", []) if value is not None]
    if len(rewards) > 1:
        yield Text(f"\nreward, {number(rewards[0])} in the first step, {number(rewards[-1])} in the last")
        yield reward_curve(rewards, console)
    yield Text()
    yield _counts(count(rollouts))
    command = escape_controls(f"aitrain show {shlex.quote(str(folder))}")
    yield Text(f"\nepisodes: {command} --worst, --failed, --step N, --case N", style="dim")


def _of_the_same_name(folder: Path) -> list[str]:
    """The runs that were started later with the name of this one."""
    later = re.compile(re.escape(folder.name) + r"-\d+")
    return sorted(path.name for path in folder.absolute().parent.iterdir() if later.fullmatch(path.name))


def _counts(counted: EpisodeCounts) -> Text:
    stops = ", ".join(f"{escape_controls(stop) or '?'} {count}" for stop, count in counted["stops"].items())
    failures = ", ".join(f"{escape_controls(kind)} {count}" for kind, count in counted["failures"].items())
    text = Text(f"{counted['all']} episodes, {counted['held_out']} of them held out; ended: {stops}")
    if failures:
        text.append(f"\nfailed: {failures}", BAD)
    if counted["damaged"]:
        text.append(f"\n{counted['damaged']} lines of the rollout files are damaged", MIDDLE)
    return text


# -- its episodes


def episodes(rollouts: RolloutIndex, numbers: Sequence[int]) -> Iterator[RenderableType]:
    """Episodes, group by group if they are adjacent: the prompt once, then the messages of each episode."""
    entries = [rollouts.entries[number] for number in numbers]
    for _, together in groupby(entries, key=lambda entry: entry.group_key):
        group = list(together)
        records = [rollouts.record(entry) for entry in group]
        yield _heading(group)
        yield from _shown_once(records[0])
        yield from messages_text(records[0].transcript()[0])
        for entry, record in zip(group, records, strict=True):
            yield Group(_facts(entry, record), *messages_text(record.transcript()[1]))
            if error := record.error:
                text = f"{error.place} {error.kind}: {error.message}"
                yield Indented(Text(escape_controls(text.strip()), style=BAD))
        yield Text()


def _heading(group: list[IndexEntry]) -> Text:
    first = group[0]
    what = escape_controls(first.eval_phase).replace("_", ", ") or f"group {first.group}"
    what += " (discarded)" if first.discarded else ""
    scores = "  ".join(number(entry.score) for entry in group) if len(group) > 1 else ""
    own = f"{escape_controls(first.environment)} " if first.environment else ""
    named = f" (case_idx {escape_controls(first.case_idx)})" if first.case_idx != first.case else ""
    return Text.assemble(
        (f"step {first.step}, {what}, case {own}{escape_controls(first.case)}{named}", "bold"), f"  {scores}"
    )


def _shown_once(record: RolloutRecord) -> Iterator[RenderableType]:
    """The case's row and the names of the tools, each on one line."""
    row = json.dumps(record.row, ensure_ascii=False)
    if len(row) > LONGEST_ROW:
        row = f"{row[:LONGEST_ROW]}… ({len(row):,} characters, all of them with --json)"
    tools = ", ".join(map(tool_name, record.tools))
    for name, text in (("row", row if record.row else ""), ("tools", tools)):
        if text:
            yield Text(f"  {name}: {escape_controls(text)}", style="dim")


def _facts(entry: IndexEntry, record: RolloutRecord) -> Text:
    score = entry.score
    colour = "dim" if score is None else GOOD if score > 0.8 else BAD if score < 0.2 else MIDDLE
    facts = ["" if entry.advantage is None else f"advantage {entry.advantage:+.2f}", escape_controls(entry.stop)]
    facts += [f"{entry.turns} turns" if entry.turns > 1 else "", f"{entry.tokens} tokens"]
    versions = [turn.weight_version for turn in record.turns]
    facts += [f"weight versions {', '.join(map(str, versions))}"] if len(set(versions)) > 1 else []
    seconds = record.seconds or 0.0
    facts += [f"environment {brief(seconds)}"] if seconds >= 0.01 else []
    facts += [f"{escape_controls(name)} {value:.3g}" for name, value in record.metrics.items() if value is not None]
    return Text.assemble(("  score " + number(score), colour), ("  " + ", ".join(filter(None, facts)), "dim"))


def messages_text(messages: Iterable[TranscriptMessage]) -> Iterator[Indented]:
    """Each message with its role and its tool calls."""
    for message in messages:
        role = escape_controls(" ".join(filter(None, (message.role, message.name))))
        calls = "".join(f"\n-> {name}({arguments})" for name, arguments in message.calls)
        yield Indented(Text.assemble((f"{role}: ", "cyan"), escape_controls(message.text + calls)))


@dataclass(frozen=True)
class Indented:
    """An indented text: wrapped in a terminal, with its own lines elsewhere."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if console.is_terminal:
            yield Padding(self.text, (0, 0, 0, INDENT), expand=False)
        else:
            yield Text("\n").join(Text(" " * INDENT) + line for line in self.text.split("\n", allow_blank=True))
