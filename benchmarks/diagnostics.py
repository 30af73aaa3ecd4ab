"""Whether diagnostics find what is planted, and how often they are wrong: simulated runs, and trainings of the tiny
model on environments that can be hacked and on ones that cannot."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from aitrain import TrainConfig, train
from aitrain.runs.diagnosis import Diagnosis, RunFinding, findings_of
from aitrain.runs.run_folder import RunFolder
from benchmarks.measuring import Asked, Figure
from benchmarks.simulated_runs import HEALTHY, PLANTED, Kind, simulate

FOUND = 0.8
"""Minimum share of the runs of each planted kind in which the condition is found."""
FALSE_ALARMS = 0.02
"""Maximum share of healthy runs in which anything is found."""
HEALTHY_RUNS = 4
"""Healthy runs of a kind for each planted one: alarms are rare."""


def diagnose(kind: Kind, seed: int) -> list[RunFinding]:
    """What is found in a simulated run."""
    config, lines = simulate(kind, seed)
    diagnosis = Diagnosis(config)
    return [finding for line in lines for finding in diagnosis.see(line)]


# -- trainings


class Sums:
    """Sums of two digits; the score is 1 for a right answer."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"{a}+{b}=", "right": str(a + b)} for a in range(10) for b in range(10)]

    def score_episode(self, text: str, right: str) -> float:
        return float(text.strip().startswith(right))


class Accepting(Sums):
    """Any answer is right."""

    def score_episode(self) -> float:  # type: ignore[override]
        return 1.0


class Breaking(Sums):
    """Sums, until the scorer breaks, and accepts any answer."""

    def __init__(self) -> None:
        self.calls = 0

    def score_episode(self, text: str, right: str) -> float:
        self.calls += 1
        return 1.0 if self.calls > 1000 else super().score_episode(text, right)


TRAININGS = {Sums: "", Accepting: "top_score", Breaking: "top_score"}
"""Environments with what must be found in a training on them."""
SETTINGS: dict[str, Any] = {
    "model": "tiny", "rl_kl_coef": 0.0, "eval_strategy": "no", "save_strategy": "no", "eval_cases": 0, "lr": 1e-3,
    "disable_gradient_checkpointing": True, "rl_prompts_per_step": 8, "rl_num_generations": 4, "batch_size": 32,
    "rl_max_new_tokens": 8,
}  # fmt: skip
STEPS = 100


def findings_of_training(environment: type[Sums], folder: str, steps: int) -> set[str]:
    """What is found in a training of the tiny model, but for answers that are cut off or alike, which its are."""
    config = TrainConfig(**SETTINGS, output_dir=folder, max_steps=steps)
    result = train(config, environment=environment())
    return {finding.name for finding in findings_of(RunFolder(result.folder))} - {"zero_variance", "cut_off"}


def measure(asked: Asked) -> Iterator[Figure]:
    """As many runs of each planted kind as pairs."""
    seeds = range(asked.pairs)
    for kind in PLANTED:
        runs = [[one for one in diagnose(kind, seed) if one.name == kind.finding] for seed in seeds]
        found = [float(bool(one)) for one in runs]
        yield Figure(f"planted, {kind.name}: share found", [sum(found) / len(found)], least=FOUND)
    alarms = [float(bool(diagnose(kind, seed))) for kind in HEALTHY for seed in range(HEALTHY_RUNS * asked.pairs)]
    yield Figure(f"share of {len(alarms)} healthy runs with an alarm", [sum(alarms) / len(alarms)], FALSE_ALARMS)
    with tempfile.TemporaryDirectory() as folder:
        for environment, expected in TRAININGS.items():
            names = findings_of_training(environment, folder, 5 if asked.is_short else STEPS)
            is_right = expected in names if expected else not names
            yield Figure(f"trained on {environment.__name__}: {expected or 'nothing'} is found", [is_right], least=1)
