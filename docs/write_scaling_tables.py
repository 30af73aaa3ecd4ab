"""Writes the tables of scaling.md and memory.md: estimates of `aitrain plan`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aitrain.batch import plan_batch  # noqa: E402
from aitrain.launch.model_shape import Linear, ModelShape  # noqa: E402
from aitrain.launch.resource_estimate import DeviceMemory, estimate_disk, estimate_memory  # noqa: E402
from aitrain.options.train import TrainConfig  # noqa: E402

PAGE, MEMORY_PAGE = ROOT / "docs" / "scaling.md", ROOT / "docs" / "memory.md"
GIB = 1 << 30


@dataclass(frozen=True)
class Dense:
    """The sizes of a dense model, as its config.json has them."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    is_tied: bool = False
    vocabulary: int = 151_936
    head_dim: int = 128

    @property
    def shape(self) -> ModelShape:
        """As it would be read from the headers of the model's files."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = {
            "q_proj": (self.hidden, query), "k_proj": (self.hidden, key), "v_proj": (self.hidden, key),
            "o_proj": (query, self.hidden), "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate), "down_proj": (self.intermediate, self.hidden),
        }  # fmt: skip
        linears = tuple(Linear(name, a + b, a * b) for name, (a, b) in sides.items()) * self.layers
        embeddings = self.vocabulary * self.hidden * (1 if self.is_tied else 2)
        weights = sum(linear.weights for linear in linears) + embeddings + 2 * self.layers * self.hidden
        sizes = (self.layers, self.hidden, self.intermediate, self.heads, self.kv_heads, self.head_dim, self.vocabulary)
        return ModelShape(weights, *sizes, linears=linears)


MODELS = (
    Dense("Qwen3-0.6B", 1024, 3072, 28, 16, 8, is_tied=True),
    Dense("Qwen3-1.7B", 2048, 6144, 28, 16, 8, is_tied=True),
    Dense("Qwen3-4B", 2560, 9728, 36, 32, 8, is_tied=True),
    Dense("Qwen3-8B", 4096, 12288, 36, 32, 8),
    Dense("Qwen3-14B", 5120, 17408, 40, 40, 8),
    Dense("Qwen3-32B", 5120, 25600, 64, 64, 8),
    Dense("Qwen2.5-72B", 8192, 29568, 80, 64, 8, vocabulary=152_064),
)
"""Known sizes, as the models themselves need not be on this machine."""


# -- what fits where

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "`--peft`": (1, {"peft": True}),
    "all weights": (1, {}),
    "8 GPUs": (8, {"distributed_backend": "fsdp2"}),
    "16 GPUs": (16, {"distributed_backend": "fsdp2"}),
    "64 GPUs": (64, {"distributed_backend": "fsdp2"}),
}
"""Heads of the columns, with the number of training processes and the options."""
GENERATION = {"use_vllm": True, "vllm_mode": "server", "rl_max_prompt_length": 1024, "rl_max_new_tokens": 4096}
LARGEST = 180
"""GiB of the largest GPU there is."""


def fits_table() -> str:
    """Memory that each training GPU needs, and sizes of a checkpoint and of a weight sync."""
    lines = [
        "| model | " + " | ".join(WAYS) + " | checkpoint | weights in bf16 |",
        "|---" * (len(WAYS) + 3) + "|",
    ]
    for model in MODELS:
        cells = [memory_cell(model.shape, *way) for way in WAYS.values()]
        config = TrainConfig(**GENERATION, max_steps=1, save_total_limit=1, save_strategy="steps")
        disk = estimate_disk(model.shape, config, plan_batch(config, 1))
        checkpoint, weights = disk.checkpoints / 2, 2 * model.shape.weights  # one is kept, one is being written
        lines.append(f"| {model.name} | " + " | ".join([*cells, gib(checkpoint), gib(weights)]) + " |")
    return "\n".join(lines)


def memory_cell(shape: ModelShape, processes: int, changed: dict[str, Any]) -> str:
    """GiB of each GPU; a dash where no GPU has as much."""
    config = TrainConfig(**GENERATION, **changed, batch_size=1, rl_prompts_per_step=8 * processes)
    need = estimate_memory(shape, config, plan_batch(config, processes), DeviceMemory("GPU")).peak
    return gib(need) if need <= LARGEST * GIB else "-"


def gib(size: float) -> str:
    """Whole GiB; one decimal below ten."""
    return f"{size / GIB:.0f}" if size >= 9.95 * GIB else f"{size / GIB:.1f}"


SMALL_MODELS = (
    Dense("Qwen2.5-0.5B", 896, 4864, 24, 14, 2, is_tied=True, head_dim=64),
    Dense("Qwen2.5-1.5B", 1536, 8960, 28, 12, 2, is_tied=True),
    Dense("Qwen2.5-3B", 2048, 11008, 36, 16, 2, is_tied=True),
    Dense("Qwen2.5-7B", 3584, 18944, 28, 28, 4, vocabulary=152_064),
)
SMALL_WAYS: dict[str, dict[str, Any]] = {
    "`--peft --quantization int4`": {"peft": True, "quantization": "int4"},
    "`--peft`": {"peft": True},
    "all weights, `--rl-kl-coef 0`": {"rl_kl_coef": 0},
    "all weights": {},
}
SMALL_BATCH = {
    "use_vllm": True, "vllm_mode": "server", "rl_max_prompt_length": 512, "rl_max_new_tokens": 1024,
    "batch_size": 4, "rl_prompts_per_step": 16, "rl_num_generations": 8,
}  # fmt: skip


def one_gpu_table() -> str:
    """Memory of one GPU for the training, without what vLLM takes."""
    lines = ["| model | " + " | ".join(SMALL_WAYS) + " |", "|---" * (len(SMALL_WAYS) + 1) + "|"]
    for model in SMALL_MODELS:
        configs = [TrainConfig(**SMALL_BATCH, **way) for way in SMALL_WAYS.values()]
        needs = [estimate_memory(model.shape, each, plan_batch(each, 1), DeviceMemory("GPU")).peak for each in configs]
        lines.append(f"| {model.name} | " + " | ".join(map(gib, needs)) + " |")
    return "\n".join(lines)


# -- the pages

TABLES = {PAGE: {"fits": fits_table}, MEMORY_PAGE: {"one-gpu": one_gpu_table}}


def with_tables(file: Path) -> str:
    """The page with the present tables, each between its two comments."""
    page = file.read_text(encoding="utf-8")
    for name, table in TABLES[file].items():
        begin, end = f"<!-- {name}: make docs -->\n", f"<!-- end of {name} -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = before + begin + table() + "\n" + end + after
    return page


if __name__ == "__main__":
    for file in TABLES:
        file.write_text(with_tables(file), encoding="utf-8")
