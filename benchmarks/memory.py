"""What `aitrain plan` says a training needs, against what real trainings on the CPU took.

`python -m benchmarks.memory [--pairs N] [--shape NAME] [--way NAME]`: three random models of clearly different
shape, each trained whole and with LoRA; the peak of the training process, less that of the same training with the tiny
model, which is what the libraries take. Exits 1 when an estimate is off by more than a quarter.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from aitrain.batch import plan_batch
from aitrain.launch.model_shape import read_model_shape
from aitrain.launch.resource_estimate import MIB, DeviceMemory, estimate_memory
from aitrain.options.train import TrainConfig
from aitrain.runs.run_folder import RunFolder
from benchmarks.measuring import ROOT, options, run, spread
from benchmarks.overhead import SURROUNDINGS, in_new_process

OFF = 0.25
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc gives freed blocks back at once, as it does by itself with the large ones of large models. Those of models as
small as these it would keep in pieces, up to four times what is in use."""
SHAPES: dict[str, dict[str, int]] = {
    "deep": {
        "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 6, "head_dim": 32,
    },
    "wide": {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "num_attention_heads": 16,
        "head_dim": 64,
    },
    "large vocabulary": {
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64,
        "vocab_size": 65536,
    },
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {"full": {}, "LoRA": {"peft": True}}
SETTINGS: dict[str, Any] = {
    "rl_env": f"{ROOT / 'benchmarks' / 'equal_prompts.py'}:EqualPrompts",
    "rl_prompts_per_step": 4,
    "rl_num_generations": 4,
    "batch_size": 8,
    "rl_max_prompt_length": 32,
    "rl_max_new_tokens": 64,
    "max_steps": 2,  # the optimizer's state is there from the second step on
    "eval_cases": 0,
    "save_strategy": "no",
    "num_processes": 1,
}


def main() -> int:
    """Measure, show, judge."""
    wanted = _options()
    os.environ.update(SURROUNDINGS | ALLOCATOR)
    worst = 0.0
    print(f"{'MiB beyond the libraries':32} {'estimate':>10} {'real (min..max)':>24}  estimate / real")
    ways = {way: settings for way, settings in WAYS.items() if wanted.way in (None, way)}
    with tempfile.TemporaryDirectory(prefix="aitrain-memory-") as folder:
        libraries = {
            way: trained(TrainConfig(**SETTINGS, **more, model="tiny", output_dir=folder)) for way, more in ways.items()
        }
        for name, sizes in SHAPES.items():
            if wanted.shape not in (None, name):
                continue
            in_new_process(make_model, (Path(folder) / name, sizes))
            for way, settings in ways.items():
                config = TrainConfig(**SETTINGS, **settings, model=str(Path(folder) / name), output_dir=folder)
                estimate, real = estimated(config), [trained(config) - libraries[way] for _ in range(wanted.pairs)]
                ratio = estimate / statistics.median(real)
                worst = max(worst, abs(ratio - 1))
                print(f"{name + ', ' + way:32} {estimate:10.0f} {spread(real):>24}  {ratio:.2f}", flush=True)
    print(f"\nworst: {worst:.0%} off, bound: {OFF:.0%}")
    return 0 if worst <= OFF else 1


def _options() -> argparse.Namespace:
    parser = options("Estimated against real memory of trainings on the CPU.")
    parser.add_argument("--shape", choices=SHAPES, help="only this one")
    parser.add_argument("--way", choices=WAYS, help="only this one")
    return parser.parse_args()


def make_model(made: tuple[Path, dict[str, int]]) -> None:
    """A Llama of random weights, with the tiny model's tokenizer."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from tests.tiny_model import build_tokenizer

    disable_progress_bar()
    folder, sizes = made
    tokenizer = build_tokenizer()
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    usual = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, "tie_word_embeddings": True}
    model = LlamaForCausalLM(LlamaConfig(**{**usual, **sizes, **ends}))
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def estimated(config: TrainConfig) -> float:
    """MiB that a process needs beyond one that trains the tiny model."""
    return (_peak(config) - _peak(config.model_copy(update={"model": "tiny"}))) / MIB


def _peak(config: TrainConfig) -> int:
    shape = read_model_shape(config.model)
    assert shape is not None
    return estimate_memory(shape, config, plan_batch(config, 1), DeviceMemory("CPU")).peak


def trained(config: TrainConfig) -> float:
    """MiB that a process took at most."""
    folder = RunFolder.create(config)
    folder.write_config(config)
    return run([sys.executable, "-P", "-m", "aitrain.jobs.worker", str(folder.path), "0"]).peak_mib


if __name__ == "__main__":
    sys.exit(main())
