"""Whether diagnostics find what is planted, and how often they are wrong: simulated runs, and trainings of the tiny
model on environments that can be hacked and on ones that cannot.

`python -m benchmarks.diagnostics [--seeds N] [--steps N]`; exits 1 when a bound is not met.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from typing import Any

from aitrain import Score
from aitrain.runs.diagnosis import Diagnosis, RunFinding, recorded_findings
from aitrain.runs.run_folder import RunFolder
from benchmarks.measuring import options, positive
from benchmarks.quiet_training import train
from benchmarks.simulated_runs import HEALTHY, PLANTED, Kind, simulate

FOUND = 0.8
"""Minimum share of the runs of each planted kind in which the condition is found."""
FALSE_ALARMS = 0.02
"""Maximum share of healthy runs in which anything is found."""
MILLISECONDS = 50.0
"""Maximum time of what a step measures and looks at, with 64 completions of 128 random tokens."""


def diagnose(kind: Kind, seed: int) -> list[RunFinding]:
    """What is found in a simulated run."""
    traits, lines = simulate(kind, seed)
    diagnosis = Diagnosis(traits)
    return [finding for line in lines for finding in diagnosis.see(line)]


# -- trainings


class Sums:
    """Sums of two digits; the score is 1 for a right answer."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"{a}+{b}=", "right": str(a + b)} for a in range(10) for b in range(10)]

    def score_episode(self, text: str, right: str) -> float:
        return float(text.strip().startswith(right))


class Parts(Sums):
    """The same with two components."""

    def score_episode(self, text: str, right: str) -> Any:  # type: ignore[override]
        correct, short = super().score_episode(text, right), float(len(text) < 6)
        return Score(0.8 * correct + 0.2 * short, metrics={"right": correct, "short": short})


class Ones(Sums):
    """The number of ones in the answer, whatever was asked."""

    def score_episode(self, text: str) -> float:  # type: ignore[override]
        return min(1.0, text.count("1") / 4)


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


TRAININGS = {Sums: "", Parts: "", Ones: "prompt_dependence", Accepting: "top_score", Breaking: "top_score"}
"""Environments with what must be found in a training on them."""
SETTINGS: dict[str, Any] = {
    "rl_prompts_per_step": 8,
    "rl_num_generations": 4,
    "batch_size": 32,
    "rl_max_new_tokens": 8,
    "lr": 1e-3,
    "eval_cases": 0,
}


def findings_of_training(environment: type[Sums], folder: str, steps: int) -> list[RunFinding]:
    """What is found in a training of the tiny model."""
    result = train(environment(), folder, **SETTINGS, max_steps=steps)
    return list(recorded_findings(RunFolder(result.folder)))


# -- time


def milliseconds_per_step(steps: int = 20) -> float:
    """Time of a step's measurements and of its look at the metrics."""
    from aitrain.training.batch_diagnostics import prompt_dependence, score_weights

    draw = random.Random(0)
    batch = [[draw.choices(range(5_000), k=128) for _ in range(8)] for _ in range(8)]
    scored = [[(draw.random(), {name: draw.random() for name in "abcd"}) for _ in range(8)] for _ in range(8)]
    begin = time.process_time()
    for _ in range(steps):
        prompt_dependence(batch)
        score_weights(scored)
    measuring = (time.process_time() - begin) / steps
    traits, lines = simulate(HEALTHY[6], 0)
    diagnosis, begin = Diagnosis(traits), time.process_time()
    for line in lines:
        diagnosis.see(line)
    return 1000 * (measuring + (time.process_time() - begin) / len(lines))


def main() -> int:
    """Print the figures; 1 if a bound is not met."""
    parser = options("Find planted conditions, and count false alarms.")
    parser.add_argument("--seeds", type=positive, default=5, help="runs of each planted and each healthy kind")
    parser.add_argument("--steps", type=positive, default=100, help="steps of each training")
    asked = parser.parse_args()
    is_met = True
    print("| planted | found | at the median step |\n|---|---|---|")
    for kind in PLANTED:
        runs = [[one for one in diagnose(kind, seed) if one.name == kind.finding] for seed in range(asked.seeds)]
        steps = sorted(found[0].step for found in runs if found and kind.says in found[0].text)
        is_met &= len(steps) >= FOUND * asked.seeds
        print(
            f"| {kind.name} | {len(steps)} of {asked.seeds} | {steps[len(steps) // 2] if steps else '-'} |", flush=True
        )
    alarms = {(kind.name, seed): diagnose(kind, seed) for kind in HEALTHY for seed in range(asked.seeds)}
    wrong = [key for key, found in alarms.items() if found]
    names = Counter(finding.name for found in alarms.values() for finding in found)
    is_met &= len(wrong) <= FALSE_ALARMS * len(alarms)
    print(f"\nfalse alarms: {len(wrong)} of {len(alarms)} healthy runs {dict(names) or ''}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for environment, expected in TRAININGS.items():
            found = [finding.name for finding in findings_of_training(environment, folder, asked.steps)]
            signs = [name for name in found if name not in ("zero_variance", "cut_off")]
            is_met &= (expected in signs) if expected else not signs
            print(f"trained on {environment.__name__}: {', '.join(found) or 'nothing'}", flush=True)
    taken = milliseconds_per_step()
    print(f"\na step's measurements and look at the metrics: {taken:.1f} ms")
    return 0 if is_met and taken <= MILLISECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
