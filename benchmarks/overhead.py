"""What aitrain adds to a step: seconds, CPU seconds and peak memory, against plain TRL with the same arguments.

The bounds are for a random model of 10 million weights, whose step takes about a second; the tiny model's ratios are
shown beside them. Both sides must generate the same completions. gpu_results.py does the same on a GPU.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from aitrain.options.train import TrainConfig
from benchmarks.measuring import ROOT, Asked, Figure, in_new_process, ratio, run
from benchmarks.models import make_model

SECONDS, MEMORY = 1.03, 1.05
WARM_UP = 2  # steps that are not timed: the first ones allocate
TINY_STEPS = 4  # times as many, because they are so short

SETTINGS: dict[str, Any] = {
    "rl_env": f"{ROOT / 'benchmarks' / 'letters.py'}:Letters",
    "rl_prompts_per_step": 4,
    "rl_num_generations": 4,
    "batch_size": 16,
    "rl_max_new_tokens": 16,
    "num_processes": 1,
    "disable_gradient_checkpointing": True,
    "eval_cases": 0,
    "eval_strategy": "no",
    "save_strategy": "no",
}


@dataclass(frozen=True)
class Training:
    """A training that both sides do; its folder holds the same settings for each of them."""

    folder: Path
    model: str
    steps: int
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other values for some of SETTINGS, and other settings."""

    @property
    def settings(self) -> dict[str, Any]:
        """All of them."""
        return {**SETTINGS, "model": self.model, "max_steps": WARM_UP + self.steps + 1, **self.more}

    def task(self, clock: Path) -> str:
        """The arguments of its environment."""
        completions = self.settings["rl_prompts_per_step"] * self.settings["rl_num_generations"]
        return json.dumps({"clock": str(clock), "completions_per_step": completions})

    @property
    def config(self) -> Path:
        """What `aitrain grpo --config` takes; JSON is YAML too."""
        return self.folder / "settings.yaml"

    @property
    def arguments(self) -> Path:
        """What plain_trl.py takes."""
        return self.folder / "arguments.json"


@dataclass(frozen=True)
class Side:
    """What one side's training took."""

    seconds: float
    """Of a step, by the clock on the wall; the mean over the timed steps."""
    cpu_seconds: float
    """Of a step, used by the process that trains."""
    peak_mib: float
    """The most that tensors took on the GPU in a timed step, or without one the process over the whole run."""
    completions: str
    """A digest of what the model said until the last step."""


def measure(asked: Asked) -> Iterator[Figure]:
    """Both models."""
    with tempfile.TemporaryDirectory(prefix="aitrain-overhead-") as place:
        folder, steps = Path(place), 1 if asked.is_short else 12
        if not asked.is_short:
            in_new_process(make_model, "10 million weights", folder / "model")
            random = Training(folder / "random", str(folder / "model"), steps)
            yield from compare("10 million weights", random, asked.pairs, SECONDS, MEMORY)
        apart = {"share_prefixes": False}  # else its many steps round to other weights, and sample other tokens
        yield from compare("tiny model", Training(folder / "tiny", "tiny", steps * TINY_STEPS, apart), asked.pairs)


def compare(
    name: str, training: Training, pairs: int, seconds: float = math.inf, memory: float = math.inf, same: float = 1
) -> Iterator[Figure]:
    """Measure both sides in turn. `same`: whether equal completions are required; a GPU's kernels may add up in
    another order every time, and the work is the same then, too, if all answers have the same length."""
    in_new_process(write_settings, training)
    done = [(trained(aitrain_command, training), trained(plain_command, training)) for _ in range(pairs)]
    ours, theirs = zip(*done, strict=True)
    measures: dict[str, tuple[Callable[[Side], float], float]] = {
        "seconds a step": (lambda side: side.seconds, seconds),
        "CPU seconds a step": (lambda side: side.cpu_seconds, math.inf),
        "peak memory, MiB": (lambda side: side.peak_mib, memory),
    }
    for measured, (of, most) in measures.items():
        yield ratio(f"{name}: {measured}", list(map(of, ours)), list(map(of, theirs)), most)
    equal = [float(one.completions == other.completions) for one, other in done]
    yield Figure(f"{name}: the same completions", equal, least=same, is_each=True)


def write_settings(training: Training) -> None:
    """The settings for aitrain, and for plain TRL the arguments that aitrain makes of them."""
    from aitrain.batch import plan_batch
    from aitrain.training.model import choose_precision, model_path
    from aitrain.training.trl_arguments import grpo_arguments

    config = TrainConfig(**training.settings)
    precision = choose_precision(config)
    grpo = grpo_arguments(config, plan_batch(config, 1), precision)
    grpo["model_init_kwargs"] = {"dtype": str(precision.dtype).removeprefix("torch.")}
    lora = {
        "r": config.lora_r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout,
        "target_modules": config.target_modules, "task_type": "CAUSAL_LM",
    }  # fmt: skip
    training.folder.mkdir()
    training.config.write_text(json.dumps(training.settings), encoding="utf-8")
    arguments = {"model": model_path(config.model), "grpo": grpo, "lora": lora if config.peft else None}
    training.arguments.write_text(json.dumps(arguments), encoding="utf-8")


def aitrain_command(training: Training, clock: Path) -> list[str]:
    """The command as a user gives it, for a run folder of its own."""
    where = ["--config", str(training.config), "--output-dir", str(training.folder / "runs")]
    return [sys.executable, "-P", "-m", "aitrain", "grpo", *where, "--rl-env-config", training.task(clock)]


def plain_command(training: Training, clock: Path) -> list[str]:
    """The same with TRL alone."""
    arguments = [str(training.arguments), training.task(clock), f"{clock}-output"]
    return [sys.executable, "-m", "benchmarks.plain_trl", *arguments]


def trained(command: Callable[[Training, Path], list[str]], training: Training) -> Side:
    """Train once, and read the stopwatch; what is timed comes last, as aitrain checks the environment at first."""
    clock = Path(tempfile.mkdtemp(dir=training.folder)) / "clock.jsonl"
    used = run(command(training, clock))
    lines = [json.loads(line) for line in clock.read_text(encoding="utf-8").splitlines()]
    timed = lines[-1 - training.steps :]
    wall, cpu = (fmean(b[time] - a[time] for a, b in pairwise(timed)) for time in ("wall", "cpu"))
    gpu_mib = max(line.get("gpu_mib", 0.0) for line in timed[1:])
    return Side(wall, cpu, gpu_mib or used.peak_mib, lines[-1]["seen"])
