"""The record of a sweep, sweep.json: its options and its trials, written after each change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from aitrain.errors import ConfigError
from aitrain.runs.heartbeat import is_alive, sign_of_life
from aitrain.runs.held_out import IntervalValues, interval_of
from aitrain.runs.json_values import JsonObject, as_float, as_object
from aitrain.runs.run_folder import LOCK, lock_file, read_object, write_json

TrialStatus = Literal["running", "finished", "pruned", "failed", "stopped"]
SWEEP_FILE = "sweep.json"


@dataclass
class Trial:
    """One trial: a run with these values of the searched options. `score` is None unless it has finished."""

    number: int
    values: dict[str, object]
    status: TrialStatus = "running"
    score: float | None = None
    interval: IntervalValues | None = None
    """95% interval of the score."""
    before: float | None = None
    """The score before the training."""
    scores: dict[int, float] = field(default_factory=dict)
    """Held-out scores during the training, by step."""
    steps: int | None = None
    seconds: float | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        """Name of its run folder."""
        return f"trial-{self.number}"

    @property
    def has_ended(self) -> bool:
        """Whether it is neither running nor to be resumed."""
        return self.status in ("finished", "pruned", "failed")


@dataclass
class SweepRecord:
    """What sweep.json holds."""

    folder: Path
    config: JsonObject
    """The options of the sweep."""
    planned: int
    """Number of trials to play."""
    status: str = "running"
    """running, finished, stopped (also after a kill), or failed (an error ended it)."""
    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial | None:
        """The finished trial with the best score; the first of equal ones."""
        sign = -1 if self.config.get("direction") == "minimize" else 1
        scored = [(trial.score, trial) for trial in self.trials if trial.score is not None]
        return max(scored, key=lambda pair: sign * pair[0])[1] if scored else None

    @property
    def ranked(self) -> list[Trial]:
        """The trials, the best first, then those without a score in their order."""
        sign = 1 if self.config.get("direction") == "minimize" else -1
        return sorted(self.trials, key=lambda trial: (trial.score is None, sign * (trial.score or 0.0)))

    def count(self, *statuses: TrialStatus) -> int:
        """Number of trials with one of these statuses."""
        return sum(trial.status in statuses for trial in self.trials)

    def write(self, durable: bool = True) -> None:
        """Write sweep.json; `durable` also makes it survive a power cut."""
        values = {name: value for name, value in asdict(self).items() if name != "folder"}
        write_json(self.folder / SWEEP_FILE, {"schema": 1, **values, **sign_of_life()}, durable)

    @classmethod
    def read(cls, folder: Path) -> SweepRecord:
        """Read sweep.json; a sweep whose process is gone is `stopped`.

        Raises:
            ConfigError: there is none, or it is damaged.
        """
        values = read_object(folder / SWEEP_FILE)
        try:
            trials = [_trial(as_object(one)) for one in values["trials"]]
            status = str(values["status"])
            status = "stopped" if status == "running" and not is_alive(values) else status
            return cls(folder, as_object(values["config"]), int(values["planned"]), status, trials)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ConfigError(f"{folder} is not the folder of a sweep: it has no valid {SWEEP_FILE}") from None


def _trial(values: dict[str, Any]) -> Trial:
    known = {name: values[name] for name in Trial.__dataclass_fields__ if name in values}
    trial = Trial(**known)
    numbers = [number for number in (trial.score, trial.before, trial.steps, trial.seconds) if number is not None]
    texts = (trial.status, trial.error or "")
    is_valid = isinstance(trial.number, int) and isinstance(trial.values, dict)
    if not is_valid or None in map(as_float, numbers) or not all(isinstance(text, str) for text in texts):
        raise ValueError("a value has a wrong type")
    trial.interval = interval_of(trial.interval)
    trial.scores = {int(step): float(score) for step, score in trial.scores.items()}
    return trial


@contextmanager
def sweep_lock(folder: Path) -> Iterator[None]:
    """Keep other processes from playing trials in this folder.

    Raises:
        ConfigError: another process does.
    """
    with (folder / LOCK).open("a") as file:  # the system releases the lock when the process ends
        if lock_file(file.fileno()) is False:
            raise ConfigError(f"Another `aitrain sweep` plays trials in {folder}\nWait for it to end, or stop it.")
        yield
