"""A scoring of cases as a run folder has recorded it: an eval, or the scoring before or after a training."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from aitrain.errors import ConfigError
from aitrain.runs.case_key import CaseKey
from aitrain.runs.held_out import DECODINGS, bounds_of
from aitrain.runs.intervals import Bounds
from aitrain.runs.json_values import JsonObject, as_int, as_object, as_text, parse_object
from aitrain.runs.rollout_index import RolloutIndex, excerpt, prompt_excerpt
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.runs.run_folder import RunFolder, read_object
from aitrain.runs.run_options import read_options


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """One episode of a case, by its number in the index."""

    number: int
    score: float | None
    metrics: dict[str, float | None]
    """The environment's own numbers, and `tokens` and `turns`."""


@dataclass(slots=True)
class RecordedCase:
    """A case with its episodes."""

    case: str
    """Its row number in its own run."""
    key: CaseKey
    prompt: str
    """The beginning of the prompt."""
    environment: str = ""
    """Name of the environment, in a run with several."""
    samples: dict[str, dict[int, RecordedSample]] = field(default_factory=lambda: {name: {} for name in DECODINGS})
    """By decoding and number of the sample; one that was recorded twice is the later one."""

    def mean(self, decoding: str, value: Callable[[RecordedSample], float | None]) -> float | None:
        """Mean value of the samples that have one; None if none has."""
        values = [found for sample in self.samples[decoding].values() if (found := value(sample)) is not None]
        return fmean(values) if values else None

    @property
    def all_samples(self) -> Iterator[RecordedSample]:
        """The episodes of all decodings."""
        for samples in self.samples.values():
            yield from samples.values()

    def scores(self, decoding: str) -> list[float]:
        """The scores of the samples that have one."""
        return [sample.score for sample in self.samples[decoding].values() if sample.score is not None]


@dataclass(eq=False)
class RecordedScoring:
    """The cases of one scoring, and what it was made with."""

    folder: Path
    phase: str
    """`before`, `after` or `eval`."""
    rollouts: RolloutIndex
    label: str = ""
    """A short name in tables."""
    cases: dict[str, RecordedCase] = field(default_factory=dict)
    options: JsonObject = field(default_factory=dict)
    environment: JsonObject = field(default_factory=dict)
    status: str = ""
    model: str = ""
    """What was scored: a model's name, and its step in a run."""

    @property
    def bounds(self) -> Bounds | None:
        """Lowest and highest score; None for scores without bounds."""
        required = as_object(self.environment.get("requires")).get("rl_score_range")  # in no option, if of several
        return bounds_of(self.options.get("rl_score_range") or required)

    @property
    def decodings(self) -> list[str]:
        """The decodings that any case has episodes of."""
        return [name for name in DECODINGS if any(case.samples[name] for case in self.cases.values())]

    @property
    def samples(self) -> Iterator[RecordedSample]:
        """All episodes of all cases."""
        for case in self.cases.values():
            yield from case.all_samples

    def record(self, sample: RecordedSample) -> RolloutRecord:
        """The whole record of an episode."""
        return self.rollouts.record(self.rollouts.entries[sample.number])

    @property
    def metrics(self) -> set[str]:
        """The names of numbers that any episode has."""
        return {name for sample in self.samples for name, value in sample.metrics.items() if value is not None}


def read_scorings(folders: Sequence[Path]) -> list[RecordedScoring]:
    """The scorings to compare: of one run those before and after its training, of several the last one of each.

    Raises:
        ConfigError: a folder has no such scoring.
    """
    if len(folders) == 1:
        rollouts = _rollouts(folders[0])
        if not _has_phase(rollouts, "after") or not _has_phase(rollouts, "before"):
            raise ConfigError(_nothing_to_compare(folders[0], rollouts))
        before, after = (_read(folders[0], phase, rollouts) for phase in ("before", "after"))
        before.label, after.label = "before", "after"
        return [before, after]
    scorings = [_last_scoring(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    for scoring, name in zip(scorings, names, strict=True):
        scoring.label = name if names.count(name) == 1 else str(scoring.folder)
    return scorings


def _last_scoring(folder: Path) -> RecordedScoring:
    rollouts = _rollouts(folder)
    for phase in ("eval", "after"):
        if _has_phase(rollouts, phase):
            return _read(folder, phase, rollouts)
    raise ConfigError(_nothing_to_compare(folder, rollouts))


def _rollouts(folder: Path) -> RolloutIndex:
    rollouts = RolloutIndex(folder / "rollouts")
    rollouts.refresh()
    return rollouts


def _has_phase(rollouts: RolloutIndex, phase: str) -> bool:
    return any(entry.eval_phase.rpartition("_")[0] == phase for entry in rollouts.entries)


def _nothing_to_compare(folder: Path, rollouts: RolloutIndex) -> str:
    if _has_phase(rollouts, "eval"):
        return f"{folder} is an eval of one model\nName what it is compared with: aitrain compare A B"
    status = as_text(read_object(RunFolder(folder).status).get("status"))
    state = f" (it is {status})" if status and status != "finished" else ""
    missing = "after" if _has_phase(rollouts, "before") else "before and after"
    return (
        f"{folder} has no scores of held-out cases {missing} its training{state}\n"
        f"Score its model with: aitrain eval {shlex.quote(str(folder))}"
    )


def _read(folder: Path, phase: str, rollouts: RolloutIndex) -> RecordedScoring:
    run = RunFolder(folder)
    scoring = RecordedScoring(folder, phase, rollouts)
    numbers = [n for n, entry in enumerate(rollouts.entries) if entry.eval_phase.rpartition("_")[0] == phase]
    raws = rollouts.each_raw(rollouts.entries[number] for number in numbers)
    for number, (entry, raw) in zip(numbers, raws, strict=True):
        _add(scoring.cases, entry.case, RolloutRecord.from_json(parse_object(raw) or {}), number)
    scoring.cases = dict(sorted(scoring.cases.items(), key=lambda item: _as_number(item[0])))
    scoring.options, scoring.environment = read_options(run.config), read_object(run.environment)
    scoring.status = as_text(read_object(run.status).get("status"))
    scoring.model = _model(run, phase, scoring.options)
    return scoring


def _add(cases: dict[str, RecordedCase], case: str, record: RolloutRecord, number: int) -> None:
    decoding = record.eval_phase.rpartition("_")[2]
    if decoding not in DECODINGS:
        return
    if case not in cases:
        cases[case] = RecordedCase(case, CaseKey.of(record), prompt_excerpt(record), record.environment)
    metrics = {**record.metrics, "tokens": float(record.tokens), "turns": float(len(record.turns))}
    cases[case].samples[decoding][record.sample or 0] = RecordedSample(number, record.score, metrics)


def _as_number(case: str) -> tuple[int, str]:
    return (int(case), "") if case.isascii() and case.isdigit() else (0, case)


def _model(run: RunFolder, phase: str, options: JsonObject) -> str:
    result = read_object(run.result)
    evaluated = as_object(result.get("model"))
    if phase == "eval":
        return excerpt(as_text(evaluated.get("given") or evaluated.get("label") or options.get("model")))
    base = excerpt(as_text(options.get("model") or result.get("base_model")))
    step = as_int(result.get("model_step") or result.get("steps")) if phase == "after" else None
    return f"{base}, step {step}" if step is not None else base
