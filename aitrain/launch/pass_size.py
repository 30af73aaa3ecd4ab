"""Chooses how many completions share a forward pass, where the options do not say.

A large pass takes a fraction of the time of many small ones, and the gradient is the same. The completions of a step
and their order are not changed. The choice depends on the options, the model's shape and the device's size only, not on
the memory that is free, so that a repeated run has the same passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from aitrain.batch import plan_batch
from aitrain.errors import ConfigError
from aitrain.launch.model_shape import ModelShape
from aitrain.launch.resource_estimate import DeviceMemory, estimate_memory
from aitrain.options.train import TrainConfig, pass_dependent

EXTRA = 2 << 30
"""On the CPU, bytes that larger passes may need, in all processes, beyond what a run with the smallest ones needs."""
SHARE = 0.8
"""Share of a GPU's memory that the estimated peak may take."""
LARGEST = 4096
"""Completions of a pass at most: larger ones save no time."""


def choose_batch_size(
    config: TrainConfig,
    processes: int,
    shape: ModelShape | None,
    device: DeviceMemory,
    recorded: Mapping[str, object] | None = None,
) -> TrainConfig:
    """The options with a batch_size, if none is given and the result does not depend on it. A resumed run takes that of
    its checkpoint, whose options are `recorded`."""
    before = recorded.get("batch_size") if recorded is not None else None
    if config.batch_size is not None or _is_fixed(config) or (recorded is not None and before is None):
        return config
    try:
        plan = plan_batch(config, processes)
    except ConfigError:
        return config  # preflight says so
    with_size = partial(_with, config, plan.prompts_per_step)
    if isinstance(before, int):
        return with_size(before)
    if shape is None or (device.kind == "GPU" and device.total is None):
        return config
    sizes = [with_size(size) for size in range(min(plan.share, LARGEST), 0, -1) if plan.share % size == 0]
    sized = DeviceMemory(device.kind, device.total, device.total) if device.kind == "GPU" else DeviceMemory("CPU")
    peaks = [estimate_memory(shape, one, plan_batch(one, processes), sized).peak for one in sizes]
    allowed = SHARE * (device.total or 0) if device.kind == "GPU" else peaks[-1] + EXTRA // processes
    return next((one for one, peak in zip(sizes, peaks, strict=True) if peak <= allowed), sizes[-1])


def _is_fixed(config: TrainConfig) -> bool:
    """Whether an option says how large forward passes are, or their size changes what is learned."""
    is_given = "gradient_accumulation" in config.model_fields_set or config.tokens_per_pass is not None
    return is_given or bool(pass_dependent(config))


def _with(config: TrainConfig, prompts: int, size: int) -> TrainConfig:
    """The options with this batch_size, and the same number of prompts in a step."""
    return config.model_copy(update={"batch_size": size, "rl_prompts_per_step": prompts})
