"""The result of an eval: what its result.json holds, computed from its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypedDict

from aitrain.runs.environment_source import package_version, source_hash
from aitrain.runs.held_out import DECODINGS, IntervalValues, Scoring, by_case
from aitrain.runs.json_values import as_text
from aitrain.runs.model_reference import ModelReference, weights_stamp
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.runs.run_folder import RunFolder, read_object, write_json
from aitrain.runs.statistics import Mixture, can_be_solved, chances, interval_of_mean, named, of_means

JOB = "eval"
"""`job` in status.json and result.json of an eval; a training has none."""
PHASE = "eval"
"""`eval_phase` of an eval's records is `eval_sampled` or `eval_greedy`."""


class EvaluatedModel(TypedDict):
    """The model that was evaluated."""

    given: str
    label: str
    kind: str
    base: str
    adapter: str | None
    step: int | None


class EvaluatedEnv(TypedDict):
    """One environment of several."""

    share: float
    cases: int


class CompletionLengths(TypedDict):
    """Sampled tokens of an episode."""

    mean: float
    median: float
    max: int


@dataclass(frozen=True)
class EvalResult:
    """The scores of one model on an environment. Values by decoding have the keys `sampled` and `greedy`."""

    folder: Path
    model: EvaluatedModel
    environment: str
    seed: int
    cases: int
    """Cases of the eval; each interval has the number of cases that it is made of."""
    samples: int
    """Sampled episodes of each case."""
    status: str = "finished"
    job: str = JOB
    scores: dict[str, IntervalValues | None] = field(default_factory=dict)
    """Mean score over the cases, by decoding."""
    pass_at: dict[str, IntervalValues | None] = field(default_factory=dict)
    """Unbiased pass@1 to pass@K of the sampled episodes; empty for scores without bounds."""
    solved: dict[str, float] = field(default_factory=dict)
    """Share of the scored cases with the highest score in at least one episode, by decoding; empty without bounds."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Means of the environment's metrics, by decoding."""
    lengths: dict[str, CompletionLengths] = field(default_factory=dict)
    stops: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of episodes by the reason of their end, by decoding."""
    failures: dict[str, int] = field(default_factory=dict)
    """Number of episodes that the environment failed on, by kind; they have no score."""
    unscored: int = 0
    """Episodes without a score, without a failure: the environment returned None."""
    dropped: int = 0
    """Episodes whose prompt left no room for an answer."""
    overlap: int = 0
    """Cases that the model was trained on, as far as this is known."""
    tokens: int = 0
    """Sampled tokens of all episodes."""
    seconds: float = 0.0
    """Duration of the episodes, over all starts."""
    turns: dict[str, float] = field(default_factory=dict)
    """Mean number of turns of an episode, by decoding."""
    environments: dict[str, EvaluatedEnv] = field(default_factory=dict)
    """Of several environments, share and cases of each; `scores` has their weighted means, and rows such as
    `sampled, NAME`."""

    def write(self) -> None:
        """Write result.json."""
        write_json(RunFolder(self.folder).result, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The content of result.json."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    @classmethod
    def read(cls, folder: Path) -> EvalResult:
        """Read the result of an eval that has ended."""
        values = read_object(RunFolder(folder).result)
        return cls(folder, **{name: values[name] for name in cls.__dataclass_fields__ if name in values})


@dataclass(frozen=True)
class EvalFacts:
    """What an eval knows beside its records."""

    environment: str
    seed: int
    cases: int
    samples: int
    mixture: Mixture
    overlap: int = 0
    seconds: float = 0.0


def eval_result(folder: Path, model: ModelReference, facts: EvalFacts, records: Iterable[RolloutRecord]) -> EvalResult:
    """The result of an eval, from all of its records."""
    played: dict[str, list[RolloutRecord]] = {}
    for record in records:
        played.setdefault(record.eval_phase.removeprefix(f"{PHASE}_"), []).append(record)
    played = {name: played[name] for name in DECODINGS if name in played}
    every = [record for found in played.values() for record in found]
    scorings = {name: _scoring(found) for name, found in played.items()}
    return EvalResult(
        folder,
        model_of(model),
        facts.environment,
        facts.seed,
        facts.cases,
        facts.samples,
        scores=dict(_score_rows(scorings, facts)),
        pass_at=pass_at_each(scorings.get("sampled", {}), facts.samples, facts.mixture),
        solved={name: share for name, one in scorings.items() for share in _solved(one, facts.mixture)},
        metrics={name: _metrics(found) for name, found in played.items()},
        lengths={name: _lengths([record.tokens for record in found]) for name, found in played.items()},
        stops={name: dict(Counter(record.stop for record in found)) for name, found in played.items()},
        failures=dict(Counter(record.error.kind for record in every if record.error)),
        unscored=sum(record.score is None and not record.error and record.stop != "no_room" for record in every),
        dropped=sum(record.stop == "no_room" for record in every),
        overlap=facts.overlap,
        tokens=sum(record.tokens for record in every),
        seconds=round(facts.seconds, 3),
        turns={name: fmean(len(record.turns) for record in found) for name, found in played.items()},
        environments={one.name: {"share": one.share, "cases": len(one.prompts)} for one in named(facts.mixture)},
    )


def _score_rows(scorings: Mapping[str, Scoring], facts: EvalFacts) -> Iterator[tuple[str, IntervalValues | None]]:
    """The mean scores by decoding, and with several environments those of each."""
    for name, scoring in scorings.items():
        yield name, interval_of_mean(scoring, facts.mixture)
        for one in named(facts.mixture):
            yield f"{name}, {one.name}", interval_of_mean(scoring, (one,))


def model_of(model: ModelReference) -> EvaluatedModel:
    """The model of an eval as its files have it."""
    adapter = None if model.adapter is None else str(model.adapter)
    return {
        "given": model.given, "label": model.label, "kind": model.kind, "base": model.base,
        "adapter": adapter, "step": model.step,
    }  # fmt: skip


def changed_since(folder: RunFolder, model: ModelReference) -> str | None:
    """What differs from when the eval in a folder began: its model's weights, or its environment's files; else None."""
    before = read_object(folder.environment)
    of_model, files = before.get("model"), before.get("files")
    if isinstance(of_model, dict) and of_model.get("weights") != weights_stamp(model):
        return f"model: {model.given}"
    if isinstance(files, list) and files and before.get("sha256") != source_hash(Path(str(file)) for file in files):
        return f"environment: {', '.join(map(str, files))}"
    for package in filter(None, as_text(before.get("package")).split(", ")):
        name, _, version = package.partition(" ")
        if version != str(package_version(name)):
            return f"environment: {name} {version}"
    return None


def pass_at_each(scoring: Scoring, samples: int, mixture: Mixture) -> dict[str, IntervalValues | None]:
    """Unbiased pass@1 to pass@K with their intervals; empty without bounds or without a scored case."""
    solvable = can_be_solved(mixture)
    if not solvable or not scoring:
        return {}
    tries = range(1, samples + 1)
    return {str(count): of_means(chances(scoring, count, mixture), solvable) for count in tries}


def _scoring(records: Sequence[RolloutRecord]) -> Scoring:
    return by_case((str(record.row_number), record.score) for record in records if record.score is not None)


def _solved(scoring: Scoring, mixture: Mixture) -> Iterable[float]:
    """The share of cases with a solved episode; nothing without a case."""
    solved: dict[str, float] = {}
    for case, scores in scoring.items():
        found = chances({case: scores}, len(scores), mixture)
        solved |= {name: float(chance > 0) for name, chance in found.items()}
    if (share := of_means(solved, can_be_solved(mixture))) is not None:
        yield share["mean"]


def _metrics(records: Sequence[RolloutRecord]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for record in records:
        for name, value in record.metrics.items():
            own = f"{record.environment}/{name}" if record.environment else name
            values.setdefault(own, []).extend([] if value is None else [value])
    return {name: fmean(found) for name, found in values.items() if found}


def _lengths(tokens: Sequence[int]) -> CompletionLengths:
    return {"mean": fmean(tokens), "median": median(tokens), "max": max(tokens)}
