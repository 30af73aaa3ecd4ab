"""What sampling ahead gains (`--rl-ahead 1`), and what it costs in learning.

`python -m benchmarks.ahead [--pairs N]` compares wall time per step with the longer side of the same steps, rollout or
optimization: with an environment that waits longer than the trainer computes, and the other way around. Without
`--rl-ahead` a step takes both. The stand-in for vLLM's server generates with transformers, in a process of its own.

`python -m benchmarks.ahead --learning` trains as `aitrain demo` does with five seeds, with and without sampling ahead,
and compares the held-out scores afterwards.

Both exit with 1 when a bound is not met.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aitrain.cli.demo import SETTINGS as DEMO
from benchmarks.measuring import ROOT, Bounds, Row, options, run, script, show, spread
from benchmarks.overhead import SURROUNDINGS

SECONDS = Bounds(ratio=1.05)
WARM_UP, STEPS = 3, 6
SEEDS = range(42, 47)
WORSE = 0.02
"""How much lower the mean held-out score over the seeds may be."""

SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "rl_env": f"{Path(__file__)}:Waits",
    "peft": True,
    "rl_prompts_per_step": 4,
    "rl_num_generations": 4,
    "batch_size": 16,
    "rl_max_new_tokens": 2,
    "rl_max_episode_tokens": 16,
    "rl_kl_coef": 0.0,
    "rl_env_workers": 16,
    "max_steps": WARM_UP + STEPS + 1,
    "eval_cases": 0,
    "eval_strategy": "no",
    "save_strategy": "no",
    "use_vllm": True,
    "vllm_mode": "server",
}


class Waits:
    """Scores after a while, as another machine would; long prompts, so that the trainer computes."""

    def __init__(self, seconds: float, words: int) -> None:
        self.seconds, self.words = seconds, words

    def build_dataset(self) -> list[dict[str, Any]]:
        """Prompts of `words` words."""
        return [{"prompt": f"{number}" + " word" * self.words} for number in range(64)]

    def score_episode(self, completion: str) -> float:
        """The share of small letters."""
        time.sleep(self.seconds)
        return sum(letter.islower() for letter in completion) / max(1, len(completion))


SIDES = {
    "the environment waits longer": {"seconds": 8.0, "words": 8},
    "the trainer computes longer": {"seconds": 0.2, "words": 70},
}


def main() -> int:
    """Measure, show, judge."""
    parser = options("Wall time per step with --rl-ahead 1, against the longer side of the same training.")
    parser.add_argument("--learning", action="store_true", help="compare held-out scores")
    wanted = parser.parse_args()
    os.environ.update(SURROUNDINGS)
    if wanted.learning:
        return learning()
    rows = [row for name, config in SIDES.items() for row in compare(name, config, wanted.pairs)]
    print(f"{wanted.pairs} pairs; seconds per step, mean of {STEPS}\n")
    return 0 if show(rows, "peer") else 1


def compare(name: str, config: dict[str, Any], pairs: int) -> list[Row]:
    """Seconds per step with sampling ahead, against the longer side of the same steps, and against steps without it."""
    ours: list[float] = []
    longer: list[float] = []
    plain: list[float] = []
    for _ in range(pairs):
        with tempfile.TemporaryDirectory(prefix="aitrain-ahead-") as folder:
            ahead = lines(train(Path(folder), {**SETTINGS, "rl_env_config": config, "rl_ahead": 1}))
            steps = lines(train(Path(folder), {**SETTINGS, "rl_env_config": config}))
        rollout = mean(ahead[1:], "time/generate") + mean(ahead[1:], "time/environment")
        optimize = mean(ahead[1:], "time/optimize")
        ours.append(pace(ahead))
        longer.append(max(rollout, optimize))
        plain.append(pace(steps))
        print(f"{name}: rollout {rollout:.2f} s, optimization {optimize:.2f} s, both {ours[-1]:.2f} s", flush=True)
    return [Row(f"{name}: the longer one", ours, longer, SECONDS), Row(f"{name}: without rl_ahead", ours, plain)]


def mean(steps: list[dict[str, Any]], part: str) -> float:
    """Mean of a metric over steps."""
    return statistics.fmean(step[part] for step in steps)


def pace(steps: list[dict[str, Any]]) -> float:
    """Seconds per step, by the clock on the wall."""
    return float(steps[-1]["seconds"] - steps[0]["seconds"]) / (len(steps) - 1)


def train(folder: Path, settings: dict[str, Any]) -> Path:
    """The run folder of a training with a server of its own."""
    name = f"ahead-{settings.get('rl_ahead', 0)}"
    with served() as url:
        values = {**settings, "vllm_server_url": url, "output_dir": str(folder), "project_name": name}
        file = folder / f"{name}.yaml"
        file.write_text(json.dumps(values))  # JSON is YAML too
        run([script("aitrain"), "grpo", "--config", str(file), "--quiet"])
    return folder / name


def lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the steps that count: not the first ones, nor the last, beside which no batch is played."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "time/step" in line][WARM_UP - 1 : -1]


@contextmanager
def served() -> Iterator[str]:
    """The address of a stand-in for vLLM's server."""
    server = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.small_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        yield server.stdout.readline().strip()
    finally:
        server.stdin.close()
        server.wait()
        server.stdout.close()


# -- learning


def learning() -> int:
    """Held-out scores of the demo with and without sampling ahead."""
    scores: dict[int, list[float]] = {0: [], 1: []}
    for seed in SEEDS:
        for ahead in scores:
            with tempfile.TemporaryDirectory(prefix="aitrain-ahead-") as folder:
                more = {"use_vllm": True, "vllm_mode": "server", "rl_ahead": ahead, "seed": seed}
                trained = train(Path(folder), {**DEMO, **more})
                result = json.loads((trained / "result.json").read_text())
            scores[ahead].append(result["score_after"])
            print(f"seed {seed}, rl_ahead {ahead}: {scores[ahead][-1]:.3f}", flush=True)
    lost = statistics.fmean(scores[0]) - statistics.fmean(scores[1])
    error = statistics.stdev(a - b for a, b in zip(*scores.values(), strict=True)) / math.sqrt(len(SEEDS))
    print(f"held-out score: ahead {spread(scores[1])}, without {spread(scores[0])}")
    verdict = "ok" if lost <= WORSE else "NOT MET"
    print(f"lower by {lost:.3f} on average, standard error {error:.3f}; bound {WORSE}: {verdict}")
    return 0 if lost <= WORSE else 1


if __name__ == "__main__":
    sys.exit(main())
