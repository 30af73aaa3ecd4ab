"""The result of a run: what result.json holds and `aitrain.train` returns."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aitrain.runs.held_out import ScoreTable, Verdict, interval_texts, verdict_sentence
from aitrain.runs.html_table import html_line, html_table
from aitrain.runs.json_values import read_whole
from aitrain.runs.run_folder import RunFolder, read_lines, write_json
from aitrain.runs.statistics import EnvResult


@dataclass(frozen=True)
class Result:
    """The result of a run. Scores are means over the held-out cases, None where there are none."""

    folder: Path
    status: str
    """`finished`, `stopped` or `failed`."""
    steps: int
    """Optimizer steps."""
    seconds: float
    """Duration of the training over all of its parts, with the evaluations during it, and without the scoring before
    and after."""
    score_before: float | None
    score_after: float | None
    greedy_before: float | None
    greedy_after: float | None
    stopped_because: str | None = None
    model_step: int | None = None
    """Optimizer step whose weights are in model/."""
    selection_score: float | None = None
    """With --save-best, the score that the step was chosen by."""
    selection_greedy: float | None = None
    selection_scorings: int | None = None
    """Number of scorings that it was chosen from."""
    selection_cases: int | None = None
    """Number of held-out cases that it was chosen by; they are in no other score. None for those of the other
    scores, of which new samples were taken."""
    scores: ScoreTable = field(default_factory=dict)
    """The scores before and after with their intervals."""
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
    environments: dict[str, EnvResult] = field(default_factory=dict)
    """Of several environments, the share and the verdict of each; `scores` has their weighted means, and a row
    for each."""
    seed: int = 0
    vllm_restarts: int = 0
    """Number of restarts of the run's vLLM server."""

    @property
    def model(self) -> Path:
        """Folder of the trained model or adapter."""
        return RunFolder(self.folder).model

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without the version of their format."""
        lines = read_lines(RunFolder(self.folder).metrics)
        return [{name: value for name, value in line.items() if name != "schema"} for line in lines]

    def _repr_html_(self) -> str:
        """The result as a notebook shows it: the held-out scores, what they say, and where the model is."""
        rows = [(name, *interval_texts(row)) for name, row in self.scores.items() if row["before"] or row["after"]]
        change = self.scores["sampled"]["change"] if "sampled" in self.scores else None
        table = html_table(("held-out", "before", "after", "change"), rows) if rows else ""
        why = f" ({self.stopped_because})" if self.stopped_because else ""
        failed = sum(self.failures.values())
        lines = [
            f"{self.status}{why}: {self.steps} steps in {self.seconds:.0f} s",
            verdict_sentence(change),
            f"{failed} of {self.episodes} episodes failed" if failed else "",
        ]
        return table + "".join(map(html_line, [*filter(None, lines), f"model: {self.model}"]))

    def write(self) -> None:
        """Write result.json."""
        values = {name: value for name, value in asdict(self).items() if name != "folder"}
        write_json(RunFolder(self.folder).result, {**values, "model": str(self.model.resolve())})

    @classmethod
    def read(cls, folder: Path) -> Result:
        """Read the result of a run that has ended; fields that an older run lacks get their defaults."""
        values = json.loads(read_whole(RunFolder(folder).result))
        return cls(folder, **{name: values[name] for name in cls.__dataclass_fields__ if name in values})
