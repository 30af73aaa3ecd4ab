"""The metrics line: what a run logged after an optimizer step, or a scoring of the held-out cases, as a JSON line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from aitrain.runs.json_values import JsonObject, parse_object
from aitrain.runs.run_folder import parsed_lines, to_jsonable

SCHEMA = 1
"""Version of the format that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """A logging step, or a scoring: the latter has `eval_score`."""

    __pydantic_config__: ClassVar = ConfigDict(allow_inf_nan=False, defer_build=True)

    schema: int = SCHEMA
    """Version of the format that the line was read from; 0 without one."""
    step: int = 0
    """Optimizer steps done."""
    seconds: float | None = None
    """Seconds since the training began or was resumed."""
    reward: float | None = None
    """Mean of the episodes' scores."""
    eval_score: float | None = None
    """Mean score of the held-out cases, sampled."""
    eval_low: float | None = None
    """Lower limit of its 95% interval."""
    eval_greedy: float | None = None
    eval_cases: int | None = None
    eval_samples: int | None = None
    values: dict[str, float | None] = field(default_factory=dict)
    """All other numbers by their names, such as `loss`, `entropy` and `env/tries`."""

    @classmethod
    def from_json(cls, values: JsonObject) -> MetricsLine:
        """The line of a JSON object.

        Raises:
            ValueError: a value is no finite number.
        """
        named = {name: values[name] for name in NAMED if name in values}
        others = {name: value for name, value in values.items() if name not in named}
        return LINE.validate_python({**named, "values": others})

    @classmethod
    def of_logs(cls, step: int, seconds: float, logs: Mapping[str, object]) -> MetricsLine:
        """The line of the trainer's logs after a step, without those that are no numbers."""
        numbers = {name: to_jsonable(value) for name, value in logs.items()}
        known = {name: value for name, value in numbers.items() if not isinstance(value, (str, list, dict))}
        return cls.from_json({**known, "step": step, "seconds": seconds})

    def to_json(self) -> JsonObject:
        """The line as a JSON object of the present format: one level, without the named fields that it lacks."""
        named = {name: getattr(self, name) for name in NAMED}
        known = {name: value for name, value in named.items() if value is not None}
        return {**known, "schema": SCHEMA, **self.values}

    @property
    def is_scoring(self) -> bool:
        """Whether it is a scoring of the held-out cases."""
        return self.eval_score is not None

    @property
    def series(self) -> dict[str, float | None]:
        """All its numbers by name, without the step."""
        return {"seconds": self.seconds, "reward": self.reward, **self.values}


NAMED = tuple(name for name in MetricsLine.__slots__ if name != "values")
LINE = TypeAdapter(MetricsLine)


def read_metrics(path: Path) -> Iterator[MetricsLine]:
    """The lines of metrics.jsonl, without damaged ones."""
    return (line for _, line in parsed_lines(path, MetricsLine.from_json))


def lines_of(texts: Iterable[bytes]) -> Iterator[MetricsLine]:
    """Some lines of metrics.jsonl, without damaged ones."""
    for text in texts:
        with suppress(ValueError):
            if (values := parse_object(text)) is not None:
                yield MetricsLine.from_json(values)
