"""The rollout record: one episode as a JSON line, with what the policy was shown, what it said, and its score."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from aitrain.runs.json_values import JsonObject, as_float, as_int, as_object, as_objects, as_text
from aitrain.runs.run_folder import read_lines, to_jsonable

SCHEMA = 2
"""Version of the format that is written; since 2 there are records with `discarded`."""
LONGEST_COLUMN = 100_000
"""Maximum characters of JSON of a row's column in a record; a longer one is replaced by its length."""

Prompt: TypeAlias = str | list[JsonObject]


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One completion of the policy inside an episode."""

    tokens: int | None
    """Sampled tokens."""
    weight_version: int
    """Optimizer steps of the weights that sampled the turn."""

    @classmethod
    def from_json(cls, values: JsonObject) -> RecordedTurn:
        """One turn of a record."""
        return cls(as_int(values.get("tokens")), as_int(values.get("weight_version")) or 0)


@dataclass(frozen=True, slots=True)
class RecordedError:
    """Why an episode has no score; `place` is the environment's method or tool."""

    kind: str
    place: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class TranscriptMessage:
    """One message of a transcript; `calls` are (tool, arguments) pairs."""

    role: str
    text: str
    name: str = ""
    calls: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, message: JsonObject) -> TranscriptMessage:
        """The transcript's message of a recorded chat message."""
        calls = message.get("tool_calls")
        pairs = tuple(map(_tool_call, calls)) if isinstance(calls, list) else ()
        role, name = str(message.get("role") or ""), str(message.get("name") or "")
        return cls(role, as_text(message.get("content")), name, pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One episode of training, or of a scoring of the held-out cases."""

    schema: int = SCHEMA
    """Version of the format that the record was read from; 0 without one."""
    step: int = 0
    """In training, the optimizer step that uses the episode; in a scoring, the steps done."""
    weight_version: int = 0
    """Optimizer steps of the weights at the beginning of the episode."""
    eval_phase: str = ""
    """The scoring of the held-out cases, such as `before_sampled`; empty in training."""
    sample: int | None = None
    """In a scoring, the number of the case's sample."""
    group: int | None = None
    """In training, the episode's group within its step."""
    environment: str = ""
    """Name of the case's environment, in a run with several."""
    row_number: int | None = None
    """The case's row in the dataset; rows of `build_eval_dataset` are numbered after those of the dataset."""
    case_idx: object = None
    """The environment's name for the case."""
    row: JsonObject = field(default_factory=dict)
    """The columns of the case's row, without the prompt."""
    seed: int | None = None
    prompt: Prompt = ""
    """The row's prompt; `messages` begins with what the policy was asked."""
    rendered_prompt: str = ""
    """What the chat template made of prompt and tools, in the first episode of each group or held-out case; empty in
    the others, and where the prompt is text."""
    tools: list[JsonObject] = field(default_factory=list)
    """Schemas of the tools that the chat template showed to the policy."""
    messages: list[JsonObject] = field(default_factory=list)
    """The whole conversation, beginning with the prompt and the environment's opening."""
    completion: str = ""
    """The policy's last answer as text."""
    turns: tuple[RecordedTurn, ...] = ()
    tokens: int = 0
    """Sampled tokens of all turns."""
    score: float | None = None
    advantage: float | None = None
    discarded: int | None = None
    """With --rl-sampling refill, the round that played an episode whose group was replaced, 0 for the batch's first
    groups; None: the episode was trained on."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    stop: str = ""
    """Why the episode ended: done, max_turns, max_tokens, truncated, env_error, env_timeout, no_room."""
    error: RecordedError | None = None
    seconds: float | None = None
    """Seconds of all calls of the environment together."""

    @classmethod
    def from_json(cls, values: JsonObject) -> RolloutRecord:
        """Read a record; values that are missing or of a wrong type get their defaults."""
        get = values.get
        asked = get("prompt")
        prompt: Prompt = as_objects(asked) if isinstance(asked, list) else as_text(asked)
        return cls(
            schema=as_int(get("schema")) or 0,
            step=as_int(get("step")) or 0,
            weight_version=as_int(get("weight_version")) or 0,
            eval_phase=as_text(get("eval_phase")),
            sample=as_int(get("sample")),
            group=as_int(get("group")),
            environment=as_text(get("environment")),
            row_number=as_int(get("row_number")),
            case_idx=get("case_idx"),
            row=as_object(get("row")),
            seed=as_int(get("seed")),
            prompt=prompt,
            rendered_prompt=as_text(get("rendered_prompt")),
            tools=as_objects(get("tools")),
            messages=as_objects(get("messages")),
            completion=as_text(get("completion")),
            turns=tuple(map(RecordedTurn.from_json, as_objects(get("turns")))),
            tokens=as_int(get("tokens")) or 0,
            score=as_float(get("score")),
            advantage=as_float(get("advantage")),
            discarded=as_int(get("discarded")),
            metrics={name: as_float(value) for name, value in as_object(get("metrics")).items()},
            stop=as_text(get("stop")),
            error=_error(get("error")),
            seconds=as_float(get("seconds")),
        )

    def to_json(self) -> JsonObject:
        """The record as a JSON object."""
        scoring = {"eval_phase": self.eval_phase or None, "sample": self.sample}
        training = {"group": self.group, "advantage": self.advantage, "discarded": self.discarded}
        error = self.error
        return {
            "schema": SCHEMA,
            "step": self.step,
            "weight_version": self.weight_version,
            **{name: value for name, value in (scoring | training).items() if value is not None},
            **({"environment": self.environment} if self.environment else {}),
            "row_number": self.row_number,
            "case_idx": self.case_idx,
            "row": self.row,
            "seed": self.seed,
            "prompt": self.prompt,
            **({"rendered_prompt": self.rendered_prompt} if self.rendered_prompt else {}),
            "tools": self.tools,
            "messages": self.messages,
            "completion": self.completion,
            "turns": [{"tokens": turn.tokens, "weight_version": turn.weight_version} for turn in self.turns],
            "tokens": self.tokens,
            "score": self.score,
            "metrics": self.metrics,
            "stop": self.stop,
            "error": error and {"kind": error.kind, "place": error.place, "message": error.message},
            "seconds": self.seconds,
        }

    def transcript(self) -> tuple[list[TranscriptMessage], list[TranscriptMessage]]:
        """The messages before the policy's first answer, and those from there on."""
        asked = len(self.prompt) if isinstance(self.prompt, list) else 1
        messages = [TranscriptMessage.of(message) for message in self.messages]
        while asked < len(messages) and messages[asked].role != "assistant":  # the environment's opening
            asked += 1
        return messages[:asked], messages[asked:]


def read_rollouts(path: Path) -> Iterator[RolloutRecord]:
    """The records of a rollout file."""
    return map(RolloutRecord.from_json, read_lines(path))


def row_columns(row: Mapping[str, object]) -> JsonObject:
    """A case's row for a record: in JSON types, without secrets, and without the prompt, which the record has."""
    return {name: _column(value) for name, value in row.items() if name != "prompt"}


def _column(value: object) -> object:
    if isinstance(value, (list, tuple, set, frozenset, Mapping)) and 3 * len(value) > LONGEST_COLUMN:
        return f"(left out: {len(value):,} items)"  # an item has three characters at least, so the JSON is too long
    column = to_jsonable(value)
    length = len(json.dumps(column, ensure_ascii=False))
    return column if length <= LONGEST_COLUMN else f"(left out: {length:,} characters)"


def _error(value: object) -> RecordedError | None:
    if isinstance(value, dict):
        place, message = as_text(value.get("place")), as_text(value.get("message"))
        return RecordedError(as_text(value.get("kind")) or "raised", place, message)
    return RecordedError("raised", "", as_text(value)) if value else None


def _tool_call(call: object) -> tuple[str, str]:
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict):
        return "", as_text(function)
    return str(function.get("name") or ""), as_text(function.get("arguments"))
