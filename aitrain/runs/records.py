"""The records of a run, as JSON lines: an episode, with what the policy was shown, what it said, and its score; and the
metrics that were logged after an optimizer step or a scoring of the held-out cases.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from aitrain.environment.completion_parser import thought_of
from aitrain.redaction import to_jsonable
from aitrain.runs.json_values import JsonObject, as_object, as_objects, as_text
from aitrain.runs.run_folder import RunFolder, parsed_lines

SCHEMA = 2
"""Version of the format that is written; since 2 there are records with `discarded`."""
OPTIONAL = {"eval_phase", "sample", "group", "advantage", "discarded", "environment", "rendered_prompt"}
"""Fields that a record may lack."""
LONGEST_COLUMN = 100_000
"""Maximum characters of JSON of a row's column in a record; a longer one is replaced by its length."""

Prompt = str | list[JsonObject]


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
    thought: str = ""

    @classmethod
    def of(cls, message: JsonObject) -> TranscriptMessage:
        """The transcript's message of a recorded chat message."""
        functions = [as_object(call.get("function", call)) for call in as_objects(message.get("tool_calls"))]
        pairs = tuple((str(one.get("name") or ""), as_text(one.get("arguments"))) for one in functions)
        role, name = str(message.get("role") or ""), str(message.get("name") or "")
        return cls(role, as_text(message.get("content")), name, pairs, thought_of(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """The facts of an episode of training, or of a scoring of the held-out cases, which an index has as well."""

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
    tokens: int = 0
    """Sampled tokens of all turns."""
    score: float | None = None
    advantage: float | None = None
    discarded: int | None = None
    """With --rl-sampling refill, the round that played an episode whose group was replaced, 0 for the batch's first
    groups; None: the episode was trained on."""
    stop: str = ""
    """Why the episode ended: done, max_turns, max_tokens, truncated, env_error, env_timeout, no_room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord(EpisodeFacts):
    """One episode of training, or of a scoring of the held-out cases, with what was said."""

    __pydantic_config__: ClassVar = ConfigDict(allow_inf_nan=False, defer_build=True)

    schema: int = SCHEMA
    """Version of the format that the record was read from; 0 without one."""
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
    """The whole conversation, beginning with the prompt and the environment's opening; thoughts are the
    `reasoning_content` of their messages."""
    completion: str = ""
    """The policy's last answer as text; empty if it ended inside its thought."""
    turns: list[JsonObject] = field(default_factory=list)
    """The completions of the policy, each with its sampled `tokens`."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    error: RecordedError | None = None
    seconds: float | None = None
    """Seconds of all calls of the environment together."""

    def to_json(self) -> JsonObject:
        """The record as a JSON object, without fields that say nothing about it."""
        values: JsonObject = RECORD.dump_python(self, warnings=False)
        known = {name: value for name, value in values.items() if name not in OPTIONAL or value not in (None, "")}
        return {**known, "schema": SCHEMA}

    def transcript(self) -> tuple[list[TranscriptMessage], list[TranscriptMessage]]:
        """The messages before the policy's first answer, and those from there on."""
        asked = len(self.prompt) if isinstance(self.prompt, list) else 1
        messages = [TranscriptMessage.of(message) for message in self.messages]
        while asked < len(messages) and messages[asked].role != "assistant":  # the environment's opening
            asked += 1
        return messages[:asked], messages[asked:]


RECORD = TypeAdapter(RolloutRecord)


def read_rollouts(run: Path) -> Iterator[RolloutRecord]:
    """The records of a run folder, without lines that are none."""
    return (record for file in RunFolder(run).rollout_files for _, record in parsed_lines(file, RECORD.validate_json))


def prompt_key(prompt: object) -> str:
    """A hash that is equal for equal prompts, as rows and records have them."""
    return hashlib.sha256(json.dumps(prompt, sort_keys=True).encode()).hexdigest()


def row_columns(row: Mapping[str, object]) -> JsonObject:
    """A case's row for a record: in JSON types, without secrets, and without the prompt, which the record has."""
    return {name: _column(value) for name, value in row.items() if name != "prompt"}


def _column(value: object) -> object:
    column = to_jsonable(value)
    length = len(json.dumps(column, ensure_ascii=False))
    return column if length <= LONGEST_COLUMN else f"(left out: {length:,} characters)"


# -- metrics

METRICS_SCHEMA = 1
"""Version of the format that is written."""


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """A logging step, or a scoring: the latter has `eval_score`."""

    step: int
    """Optimizer steps done."""
    values: Mapping[str, float | None]
    """All other numbers by their names, such as `reward`, `loss` and `env/tries`."""

    @classmethod
    def from_json(cls, line: bytes) -> MetricsLine:
        """The line of metrics.jsonl.

        Raises:
            ValueError: it is no JSON object, or a value is no finite number.
        """
        numbers = NUMBERS.validate_json(line)
        return cls(int(numbers.pop("step", None) or 0), {name: numbers[name] for name in numbers if name != "schema"})

    @classmethod
    def of_logs(cls, step: int, seconds: float, logs: Mapping[str, object]) -> MetricsLine:
        """The line of the trainer's logs after a step, without those that are no numbers."""
        numbers = {name: to_jsonable(value) for name, value in logs.items()}
        known = {name: value for name, value in numbers.items() if not isinstance(value, (str, list, dict))}
        return cls(step, NUMBERS.validate_python({**known, "seconds": seconds}))

    def to_json(self) -> JsonObject:
        """The line as a JSON object of the present format: one level."""
        return {"schema": METRICS_SCHEMA, "step": self.step, **self.values}

    @property
    def eval_score(self) -> float | None:
        """Mean score of the held-out cases, sampled."""
        return self.values.get("eval_score")

    @property
    def is_scoring(self) -> bool:
        """Whether it is a scoring of the held-out cases."""
        return self.eval_score is not None


NUMBERS = TypeAdapter(dict[str, int | float | None], config=ConfigDict(allow_inf_nan=False, defer_build=True))


def read_metrics(path: Path) -> Iterator[MetricsLine]:
    """The lines of metrics.jsonl, without damaged ones."""
    return (line for _, line in parsed_lines(path, MetricsLine.from_json))
