"""The result of a run, which `aitrain.train` returns, and that of an eval, which is computed from its records: what
their result.json hold.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from aitrain.errors import ConfigError
from aitrain.runs.held_out import (
    DECODINGS,
    IntervalValues,
    ScoreTable,
    Verdict,
    grouped,
    titled_table,
    verdict_sentence,
)
from aitrain.runs.records import RolloutRecord, read_metrics
from aitrain.runs.run_folder import RunFolder, read_object, write_json
from aitrain.runs.statistics import Mixture, case_values, of_means


@dataclass(frozen=True)
class StoredResult:
    """A result that is stored as the result.json of its folder."""

    folder: Path

    def to_json(self) -> dict[str, Any]:
        """The content of result.json."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}

    def write(self) -> None:
        """Write result.json."""
        write_json(RunFolder(self.folder).result, self.to_json())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The result of a run or an eval that has ended; fields that an older one lacks get their defaults.

        Raises:
            ConfigError: there is none that can be read.
        """
        file = RunFolder(folder).result
        values = read_object(file)
        if not values:
            raise ConfigError(f"{file} is missing or damaged: the run has not ended, or the file was changed.")
        return cls(folder, **{name: values[name] for name in cls.__dataclass_fields__ if name in values})


@dataclass(frozen=True)
class Result(StoredResult):
    """The result of a run. Scores are means over the held-out cases, None where there are none."""

    status: str
    """`finished`, `stopped` or `failed`."""
    steps: int
    """Optimizer steps."""
    seconds: float
    """Duration of the training over all of its parts, with the evaluations during it, and without the scoring before
    and after."""
    score_before: float | None
    score_after: float | None
    stopped_because: str | None = None
    model_step: int | None = None
    """Optimizer step whose weights are in model/."""
    selection_score: float | None = None
    """With --save-best, the score that the step was chosen by."""
    selection_scorings: int | None = None
    """Number of scorings that it was chosen from."""
    selection_cases: int | None = None
    """Number of held-out cases that it was chosen by; they are in no other score. None for those of the other
    scores, of which new samples were taken."""
    scores: ScoreTable = field(default_factory=dict)
    """The scores before and after with their intervals; of several environments, their weighted means, and rows such as
    `sampled, NAME`."""
    verdict: Verdict | None = None
    """`better`, `worse` or `undetected`, by the change of the sampled score; None without scores before and after."""
    episodes: int = 0
    """All episodes, those of the scorings included."""
    failures: dict[str, int] = field(default_factory=dict)
    """Episodes that the environment failed on, by kind of failure."""
    eval_cases: int = 0
    eval_samples: int = 1
    eval_overlap: int = 0
    """Held-out cases with the prompt of a training case."""
    train_cases: int = 0
    base_model: str = ""
    environment: str = ""
    """Name of the environment's class; of several, their names."""
    seed: int = 0

    @property
    def model(self) -> Path:
        """Folder of the trained model or adapter."""
        return RunFolder(self.folder).model

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without the version of their format."""
        return [{"step": line.step, **line.values} for line in read_metrics(RunFolder(self.folder).metrics)]

    def __repr__(self) -> str:
        """How the run ended, the held-out scores before, after and of the change, what they say, and where the model
        is."""
        why = f" ({self.stopped_because})" if self.stopped_because else ""
        said = (
            f"{self.status}{why}: {self.steps} steps in {self.seconds:.0f} s",
            titled_table(self.scores, "before", "after"),
            verdict_sentence(self.scores["sampled"]["change"]) if "sampled" in self.scores else "",
            f"{sum(self.failures.values())} of {self.episodes} episodes failed",
            f"model: {self.model}",
        )
        return "\n".join(filter(None, said))

    def to_json(self) -> dict[str, Any]:
        """The content of result.json, with the folder of the model."""
        return {**super().to_json(), "model": str(self.model.resolve())}


# -- an eval

JOB = "eval"
"""`job` in status.json and result.json of an eval; a training has none."""
PHASE = "eval"
"""`eval_phase` of an eval's records is `eval_sampled` or `eval_greedy`."""


@dataclass(frozen=True)
class EvalResult(StoredResult):
    """The scores of one model on an environment. Values by decoding have the keys `sampled` and `greedy`."""

    model: dict[str, Any]
    """`ModelReference.facts`."""
    environment: str
    seed: int
    cases: int
    """Cases of the eval; each interval has the number of cases that it is made of."""
    samples: int
    """Sampled episodes of each case."""
    status: str = "finished"
    job: str = JOB
    scores: dict[str, IntervalValues | None] = field(default_factory=dict)
    """Mean score over the cases, by decoding; of several environments, their weighted means, and rows such as
    `sampled, NAME`. With K samples also `pass@K`, unless scores have no bounds."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Means of the environment's metrics, by decoding."""
    lengths: dict[str, float] = field(default_factory=dict)
    """Mean of the sampled tokens of an episode, by decoding."""
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


def with_scores(begun: EvalResult, mixture: Mixture, records: Iterable[RolloutRecord]) -> EvalResult:
    """A result without scores, with what all records of the eval say."""
    every = list(records)
    result = replace(
        begun,
        failures=dict(Counter(record.error.kind for record in every if record.error)),
        unscored=sum(record.score is None and not record.error and record.stop != "no_room" for record in every),
        dropped=sum(record.stop == "no_room" for record in every),
        tokens=sum(record.tokens for record in every),
    )
    for name in DECODINGS:
        played = [record for record in every if record.eval_phase == f"{PHASE}_{name}"]
        if not played:
            continue
        scoring = grouped((str(record.row_number), record.score) for record in played if record.score is not None)
        tries = result.samples if name == "sampled" and scoring else 1
        for row, (means,), envs in case_values(name, [scoring], mixture, tries):
            result.scores[row] = of_means(means, envs)
        values = grouped(
            (f"{record.environment}/{metric}" if record.environment else metric, value)
            for record in played
            for metric, value in record.metrics.items()
            if value is not None
        )
        result.metrics[name] = {metric: fmean(found) for metric, found in values.items()}
        result.lengths[name] = fmean(record.tokens for record in played)
        result.stops[name] = dict(Counter(record.stop for record in played))
    return result
