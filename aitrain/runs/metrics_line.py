"""The metrics line: what a run logged after an optimizer step, or a scoring of the held-out cases, as a JSON line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aitrain.runs.json_values import JsonObject, as_float, as_int
from aitrain.runs.run_folder import read_lines, to_jsonable

SCHEMA = 1
"""Version of the format that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsLine:
    """A logging step, or a scoring: the latter has `eval_score`."""

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
    trained_seconds: float | None = None
    """Seconds of the training until the scoring's end, over all parts of a resumed run."""
    trained_tokens: int | None = None
    """Tokens sampled in training until then, on all processes."""
    values: Mapping[str, float | None] = field(default_factory=dict)
    """All other numbers by their names, such as `loss`, `entropy` and `env/tries`."""

    @classmethod
    def from_json(cls, values: JsonObject) -> MetricsLine:
        """Read a line of any format; values that are missing or of a wrong type get their defaults."""
        get = values.get
        return cls(
            schema=as_int(get("schema")) or 0,
            step=as_int(get("step")) or 0,
            seconds=as_float(get("seconds")),
            reward=as_float(get("reward")),
            eval_score=as_float(get("eval_score")),
            eval_low=as_float(get("eval_low")),
            eval_greedy=as_float(get("eval_greedy")),
            eval_cases=as_int(get("eval_cases")),
            eval_samples=as_int(get("eval_samples")),
            trained_seconds=as_float(get("trained_seconds")),
            trained_tokens=as_int(get("trained_tokens")),
            values={name: as_float(value) for name, value in values.items() if name not in NAMED},
        )

    @classmethod
    def of_logs(cls, step: int, seconds: float, logs: Mapping[str, object]) -> MetricsLine:
        """The line of the trainer's logs after a step."""
        return cls.from_json(
            {name: to_jsonable(value) for name, value in logs.items()} | {"step": step, "seconds": seconds}
        )

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


def read_metrics(path: Path) -> Iterator[MetricsLine]:
    """The lines of metrics.jsonl."""
    return map(MetricsLine.from_json, read_lines(path))
