"""What aitrain adds to a step: seconds per step and peak memory against plain TRL with the same arguments.

`python -m benchmarks.overhead [--pairs N] [--steps N]`; exits 1 when a bound is not met. The bounds are for a random
model of 10 million weights, whose step takes about a second; the tiny model's ratios are shown beside them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from aitrain.options.train import TrainConfig
from benchmarks.measuring import ROOT, Bounds, Row, options, positive, run, show

SECONDS, MEMORY = Bounds(ratio=1.03), Bounds(ratio=1.05)
WARM_UP = 2  # steps that are not timed: the first ones allocate
TINY_STEPS = 4  # times as many, because they are so short

PROMPTS, GENERATIONS = 4, 4
SETTINGS: dict[str, Any] = {
    "rl_env": f"{ROOT / 'benchmarks' / 'letters.py'}:Letters",
    "rl_prompts_per_step": PROMPTS,
    "rl_num_generations": GENERATIONS,
    "batch_size": PROMPTS * GENERATIONS,
    "rl_max_new_tokens": 16,
    "num_processes": 1,
    "eval_cases": 0,
    "eval_strategy": "no",
    "save_strategy": "no",
}

SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",  # two that wait for each other measure what else the machine is doing
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}
"""The same for both sides."""


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

    @property
    def task(self) -> dict[str, Any]:
        """What the stopwatch must know."""
        return {"completions_per_step": self.settings["rl_prompts_per_step"] * self.settings["rl_num_generations"]}

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
    gpu_mib: float
    """The most that tensors took on the GPU in a timed step; 0 without one."""
    completions: str
    """A digest of what the model said until the last step."""


def main() -> int:
    """Measure, show, judge."""
    wanted = _options()
    os.environ.update(SURROUNDINGS)
    with tempfile.TemporaryDirectory(prefix="aitrain-overhead-") as folder:
        random, tiny = prepare(Path(folder), wanted.steps)
        launcher = run([*aitrain_command(random, random.folder / "clock"), "--dry-run", "--options-only"]).peak_mib
        rows = compare("10 million weights", random, wanted.pairs, (SECONDS, MEMORY))
        rows += compare("tiny model", tiny, wanted.pairs, (None, None))
    print(f"{wanted.pairs} pairs; {wanted.steps} timed steps of the random model, {tiny.steps} of the tiny one\n")
    is_met = show(rows, "plain TRL")
    print(f"\npeak memory is the training process's; aitrain's launcher, a second process, peaks at {launcher:.0f} MiB")
    return 0 if is_met else 1


def _options() -> argparse.Namespace:
    parser = options("Seconds per step and peak memory of aitrain, against plain TRL with the same arguments.")
    parser.add_argument("--steps", type=positive, default=12, help="timed steps of each training (default: 12)")
    return parser.parse_args()


# -- before


def prepare(folder: Path, steps: int) -> tuple[Training, Training]:
    """The trainings of the random and of the tiny model, written down."""
    random = Training(folder / "random", str(folder / "random" / "model"), steps)
    tiny = Training(folder / "tiny", "tiny", steps * TINY_STEPS)
    in_new_process(make_random_model, Path(random.model))
    for training in (random, tiny):
        in_new_process(write_settings, training)
    return random, tiny


def in_new_process(work: Callable[[Any], None], argument: Any) -> None:
    """What needs torch happens elsewhere: see `measuring.run`. A process that has imported it already is forked."""
    new: Any = multiprocessing.get_context("fork" if "torch" in sys.modules else "spawn")
    process = new.Process(target=work, args=(argument,))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"what needs torch ended with exit code {process.exitcode}")


def make_random_model(folder: Path) -> None:
    """A Llama of 10 million random weights, with the tiny model's tokenizer."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from tests.tiny_model import build_tokenizer

    disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=320, intermediate_size=864, num_hidden_layers=8,
        num_attention_heads=5, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True, **ends,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_settings(training: Training) -> None:
    """The settings for aitrain, and for plain TRL the arguments that aitrain makes of them."""
    from aitrain.batch import plan_batch
    from aitrain.training.model import choose_precision, model_path
    from aitrain.training.trl_arguments import grpo_arguments

    config = TrainConfig(**training.settings)
    precision = choose_precision(config)
    grpo = grpo_arguments(config, plan_batch(config, 1), precision)
    grpo["model_init_kwargs"] = {"dtype": str(precision.dtype).removeprefix("torch.")}
    lora = _lora(config) if config.peft else None
    training.folder.mkdir(exist_ok=True)
    training.config.write_text(json.dumps(training.settings), encoding="utf-8")
    arguments = {"model": model_path(config.model), "task": training.task, "grpo": grpo, "lora": lora}
    training.arguments.write_text(json.dumps(arguments), encoding="utf-8")


def _lora(config: TrainConfig) -> dict[str, Any]:
    """What plain TRL is told of the adapter."""
    sizes = {"r": config.lora_r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
    return sizes | {"target_modules": config.target_modules, "task_type": "CAUSAL_LM"}


# -- during


def compare(name: str, training: Training, pairs: int, bounds: tuple[Bounds | None, Bounds | None]) -> list[Row]:
    """Both sides in turn, so many times; one row a measure. Of the times, the one on the wall has the bound."""
    done = [(aitrain(training), plain_trl(training)) for _ in range(pairs)]
    check_same_work([side for pair in done for side in pair])
    return [
        row(f"{name}: seconds per step", done, lambda side: side.seconds, bounds[0]),
        row(f"{name}: CPU seconds per step", done, lambda side: side.cpu_seconds),
        row(f"{name}: peak memory, MiB", done, lambda side: side.peak_mib, bounds[1]),
    ]


def row(
    name: str, done: list[tuple[Side, Side]], measure: Callable[[Side], float], bounds: Bounds | None = None
) -> Row:
    """One measure of all pairs."""
    return Row(name, [measure(ours) for ours, _ in done], [measure(theirs) for _, theirs in done], bounds)


def aitrain(training: Training) -> Side:
    """The command as a user gives it."""
    return measured(aitrain_command, training)


def aitrain_command(training: Training, clock: Path) -> list[str]:
    """A training into a run folder of its own."""
    task = json.dumps(training.task | {"clock": str(clock)})
    where = ["--config", str(training.config), "--output-dir", str(training.folder / "runs")]
    return [sys.executable, "-P", "-m", "aitrain", "grpo", *where, "--rl-env-config", task, "--debug"]


def plain_trl(training: Training) -> Side:
    """The same with TRL alone."""
    return measured(plain_command, training)


def plain_command(training: Training, clock: Path) -> list[str]:
    """A training into a folder of its own."""
    script_arguments = [str(training.arguments), str(clock), f"{clock}-output"]
    return [sys.executable, "-m", "benchmarks.plain_trl", *script_arguments]


def measured(command: Callable[[Training, Path], list[str]], training: Training) -> Side:
    """Train once, and read the stopwatch."""
    clock = Path(tempfile.mkdtemp(dir=training.folder)) / "clock.jsonl"
    used = run(command(training, clock))
    lines = [json.loads(line) for line in clock.read_text(encoding="utf-8").splitlines()]
    gpu_mib = max(line.get("gpu_mib", 0.0) for line in lines[WARM_UP + 1 :])
    return Side(_per_step(lines, "wall"), _per_step(lines, "cpu"), used.peak_mib, gpu_mib, lines[-1]["seen"])


def _per_step(lines: list[dict[str, Any]], clock: str) -> float:
    times = [line[clock] for line in lines[WARM_UP:]]
    return fmean(later - earlier for earlier, later in pairwise(times))


def check_same_work(sides: Sequence[Side]) -> None:
    """Same prompts, seed and arguments: the same completions, or the ratio means nothing.

    Raises:
        RuntimeError: they differ.
    """
    if len({side.completions for side in sides}) != 1:
        raise RuntimeError("the two sides did not generate the same completions: their times cannot be compared")


if __name__ == "__main__":
    sys.exit(main())
