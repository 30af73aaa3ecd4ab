"""Writes the tables of scaling.md and memory.md: estimates of `aitrain plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from aitrain.batch import plan_batch  # noqa: E402
from aitrain.launch.hardware import KINDS, GpuKind  # noqa: E402
from aitrain.launch.model_shape import KNOWN, ModelShape, known_shape  # noqa: E402
from aitrain.launch.resource_estimate import (  # noqa: E402
    TIGHT,
    DeviceMemory,
    ResourceEstimate,
    memory_of,
)
from aitrain.options.train import TrainConfig  # noqa: E402

PAGE, MEMORY_PAGE = ROOT / "docs" / "scaling.md", ROOT / "docs" / "memory.md"
GIB = 1 << 30
GPU = DeviceMemory("GPU")


MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen2.5-72B")


def shape_of(name: str) -> ModelShape:
    """The shape of a known model."""
    shape = known_shape(name)
    assert shape is not None
    return shape


def needs(shape: ModelShape, config: TrainConfig, processes: int = 1, device: DeviceMemory = GPU) -> ResourceEstimate:
    """What a run needs with these options."""
    return ResourceEstimate(shape, config, plan_batch(config, processes), device)


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
        shape = shape_of(model)
        cells = [memory_cell(shape, *way) for way in WAYS.values()]
        checkpoint = needs(shape, TrainConfig(**GENERATION)).disk[1]
        weights = 2 * shape.weights
        lines.append(f"| {model} | " + " | ".join([*cells, gib(checkpoint), gib(weights)]) + " |")
    return "\n".join(lines)


def memory_cell(shape: ModelShape, processes: int, changed: dict[str, Any]) -> str:
    """GiB of each GPU; a dash where no GPU has as much."""
    config = TrainConfig(**GENERATION, **changed, batch_size=1, rl_prompts_per_step=8 * processes)
    need = needs(shape, config, processes).memory.peak
    return gib(need) if need <= LARGEST * GIB else "-"


def gib(size: float) -> str:
    """Whole GiB; one decimal below ten."""
    return f"{size / GIB:.0f}" if size >= 9.95 * GIB else f"{size / GIB:.1f}"


ONE_GPU: dict[str, dict[str, Any]] = {
    "all weights, `--rl-kl-coef 0`": {"rl_kl_coef": 0.0},
    "`--peft`": {"peft": True},
    "`--peft --quantization int4`": {"peft": True, "quantization": "int4"},
}
ONE_BATCH = {
    "use_vllm": True, "vllm_mode": "server", "rl_max_prompt_length": 512, "rl_max_new_tokens": 1024,
    "batch_size": 1, "rl_prompts_per_step": 16, "rl_num_generations": 8,
}  # fmt: skip


def one_gpu_table() -> str:
    """The largest known model that one GPU can train in each way, without what vLLM takes."""
    lines = ["| GPU | " + " | ".join(ONE_GPU) + " |", "|---" * (len(ONE_GPU) + 1) + "|"]
    by_size = sorted(KNOWN, key=lambda model: shape_of(model).weights)
    for kind in KINDS.values():
        largest = [[model for model in by_size if fits(shape_of(model), kind, way)] for way in ONE_GPU.values()]
        lines.append(f"| {kind.name} | " + " | ".join(models[-1] for models in largest) + " |")
    return "\n".join(lines)


def fits(shape: ModelShape, kind: GpuKind, way: dict[str, Any]) -> bool:
    """Whether a tenth of the memory is left."""
    device = memory_of(kind)
    peak = needs(shape, TrainConfig(**ONE_BATCH, **way), device=device).memory.peak
    return peak <= TIGHT * (device.total or 0)


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
