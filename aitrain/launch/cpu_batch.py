"""Chooses how many completions share a forward pass on the CPU, where the options do not say.

A large pass takes a fraction of the time of many small ones, and the gradient is the same. The completions of a step
and their order are not changed. The choice depends on the options and the model's shape only, not on the memory that
is free, so that a repeated run has the same passes.
"""

from __future__ import annotations

from collections.abc import Mapping

from aitrain.batch import plan_batch
from aitrain.launch.model_shape import ModelShape
from aitrain.launch.resource_estimate import DeviceMemory, estimate_memory
from aitrain.options.train import TrainConfig, pass_dependent

EXTRA = 2 << 30
"""Bytes that larger passes may need, in all processes, beyond what a run with the smallest ones needs."""
LARGEST = 4096
"""Completions of a pass at most: larger ones save no time."""
COUNTS_OF_PASSES = ("steps_per_generation", "generation_batch_size")
"""Fields of `--trl` that count forward passes, or multiples of them."""


def choose_batch_size(
    config: TrainConfig, processes: int, shape: ModelShape | None, recorded: Mapping[str, object] | None = None
) -> TrainConfig:
    """The options with a batch_size, if none is given and the result does not depend on it. A resumed run takes that of
    its checkpoint, whose options are `recorded`."""
    before = recorded.get("batch_size") if recorded is not None else None
    if config.batch_size is not None or _is_fixed(config) or (recorded is not None and before is None):
        return config
    if config.rl_prompts_per_step is not None:
        share, rest = divmod(config.rl_prompts_per_step * config.rl_num_generations, processes)
    else:
        share = config.gradient_accumulation * config.completions_per_pass
        rest = processes * share % config.rl_num_generations
    if rest:
        return config  # plan_batch refuses it
    if isinstance(before, int) and share % before == 0:
        return _with(config, before, share)
    if shape is None:
        return config
    sizes = [_with(config, size, share) for size in range(min(share, LARGEST), 0, -1) if share % size == 0]
    peaks = [estimate_memory(shape, one, plan_batch(one, processes), DeviceMemory("CPU")).peak for one in sizes]
    allowed = peaks[-1] + EXTRA // processes
    return next(one for one, peak in zip(sizes, peaks, strict=True) if peak <= allowed)


def _is_fixed(config: TrainConfig) -> bool:
    """Whether forward passes are counted by an option, or their size changes what is learned."""
    counted = "gradient_accumulation" in config.model_fields_set or any(config.trl.get(one) for one in COUNTS_OF_PASSES)
    return counted or config.trims_padding or bool(pass_dependent(config))


def _with(config: TrainConfig, size: int, share: int) -> TrainConfig:
    """The options with this batch_size, and as many passes as the completions of a step need."""
    passes = {} if config.rl_prompts_per_step is not None else {"gradient_accumulation": share // size}
    return config.model_copy(update={"batch_size": size, **passes})
