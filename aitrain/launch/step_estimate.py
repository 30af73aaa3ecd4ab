"""The seconds of a step on hardware that need not be here, computed from its operations and bytes. Nobody measured them:
they are a range, from the fast to the slow assumptions below. The environment's own time is not in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from aitrain.batch import BatchPlan
from aitrain.launch.model_shape import ModelShape, read_model_shape
from aitrain.launch.nvidia import Hardware
from aitrain.launch.resource_estimate import (
    PROMPT,
    TIGHT,
    MemoryEstimate,
    WeightSizes,
    changes_that_fit,
    estimate_memory,
    memory_of,
    served_tokens,
    served_weights,
)
from aitrain.options.fsdp_settings import fsdp_settings
from aitrain.options.train import TrainConfig

GIGA = 1e9
SLOTS = 256
"""Completions that vLLM generates at a time at most (max_num_seqs)."""
IN_FLOAT32 = 8
"""How much slower products are in float32."""
SYNCED_LAYER = 10
"""Tensors of a layer that a weight sync moves one by one."""
OPTIMIZED = 12
"""How often the optimizer reads or writes a number for each trained weight: weight, gradient, two moments, their
intermediate results, and the gradient's norm."""


@dataclass(frozen=True)
class Assumptions:
    """What a step's time depends on beside the data sheet."""

    length: float
    """Mean completion, as a share of the limit; the longest one has twice that, or the limit."""
    flops: float
    """Share of the FLOPS that matrix products reach (model FLOP utilisation)."""
    bandwidth: float
    """Share of the bandwidth to memory."""
    launch: float
    """Seconds that a layer takes at least in a forward pass of transformers; a tenth in vLLM's CUDA graphs."""
    network: float
    """GB/s from a machine to the others."""
    files: float
    """GB/s to and from files."""


FAST, SLOW = Assumptions(0.3, 0.45, 0.8, 0.0005, 400, 3), Assumptions(0.8, 0.15, 0.4, 0.0015, 12.5, 0.8)
ASSUMED = (
    f"mean completions of {FAST.length:.0%} to {SLOW.length:.0%} of the limit, {FAST.flops:.0%} to {SLOW.flops:.0%} of"
    f" the FLOPS, {FAST.bandwidth:.0%} to {SLOW.bandwidth:.0%} of the bandwidth, {1000 * FAST.launch:g} to"
    f" {1000 * SLOW.launch:g} ms to launch a layer, {FAST.network:g} to {SLOW.network:g} GB/s between machines,"
    f" {FAST.files:g} to {SLOW.files:g} GB/s to files; nothing for the environment"
)


@dataclass(frozen=True)
class HardwareEstimate:
    """What a run needs of hardware, and does there."""

    total: int
    """Bytes of a GPU."""
    peak: int
    """Bytes that a training process needs at any time."""
    memory: MemoryEstimate
    fits: bool
    changes: list[str] | None
    """Flags with which it would fit, if it does not; None if there are none."""
    vllm_tokens: int
    """Tokens of vLLM's cache on a GPU; 0 without vLLM, less if its weights do not fit."""
    passes: int
    """Forward passes of a process in a step with the longest completions."""
    scoring_passes: int
    """Those without gradients: for vLLM's correction or later updates, and for the reference."""
    seconds: Mapping[str, tuple[float, float]]
    """Of the parts of a step, and of the step, at least and at most."""

    @classmethod
    def of(cls, config: TrainConfig, batch: BatchPlan, hardware: Hardware) -> HardwareEstimate:
        """The estimate for a model whose shape is known."""
        shape, device = read_model_shape(config.model), memory_of(hardware.kind)
        assert shape is not None
        assert device.total is not None
        memory, allowed = estimate_memory(shape, config, batch, device), TIGHT * device.total
        tokens = served_tokens(shape, config, device.total) if config.use_vllm else 0
        length = (config.rl_max_prompt_length or PROMPT) + (config.rl_max_episode_tokens or config.rl_max_new_tokens)
        passes = math.ceil(batch.share / batch.largest_pass(length)[0])
        fast, slow = (_seconds(shape, config, batch, hardware, assumed) for assumed in (FAST, SLOW))
        return cls(
            device.total,
            memory.peak,
            memory,
            memory.peak <= allowed and (tokens >= length or not config.use_vllm),
            changes_that_fit(shape, config, batch, device, allowed),
            tokens,
            passes,
            passes * _scorings(config),
            {part: (fast[part], slow[part]) for part in fast},
        )


def _scorings(config: TrainConfig) -> int:
    is_repeated = config.rl_updates_per_rollout * config.trl_integer("num_iterations", 1) > 1
    return int(config.use_vllm or is_repeated) + int(config.rl_kl_coef > 0)


def _seconds(
    shape: ModelShape, config: TrainConfig, batch: BatchPlan, hardware: Hardware, assumed: Assumptions
) -> dict[str, float]:
    kind, weights = hardware.kind, WeightSizes.of(shape, config, hardware.kind.has_bf16)
    is_half = weights.is_mixed or weights.width == 2
    flops = kind.teraflops * 1e12 * assumed.flops / (1 if is_half else IN_FLOAT32)
    memory, launch = kind.bandwidth * GIGA * assumed.bandwidth, shape.layers * assumed.launch
    link = GIGA * (kind.link if hardware.machines == 1 else min(kind.link, assumed.network))
    is_sharded = config.distributed_backend == "fsdp2"
    exchanged = (batch.processes - 1) / batch.processes / link  # seconds a byte that all processes get
    gathered = (2 if is_half else 4) * shape.weights * exchanged if is_sharded else 0.0

    prompt = config.rl_max_prompt_length or PROMPT
    limit = config.rl_max_episode_tokens or config.rl_max_new_tokens
    mean = assumed.length * limit
    longest = min(limit, 2 * mean)

    def forward(tokens: float, context: float) -> float:
        """Operations of tokens that attend to half of the context in the mean."""
        attention = 2 * shape.layers * shape.heads * shape.head_dim * context
        return tokens * (2 * (shape.weights - shape.idle) + attention)

    # generation of one rollout: a prefill of each group's prompt, then tokens one by one, each of which reads all weights
    rows, engine, between = batch.share * config.rl_updates_per_rollout, 1, launch
    slots, read, value = float(rows), weights.all, weights.width
    if config.use_vllm:
        engine = config.vllm_tensor_parallel_size
        servers = (
            batch.processes / engine
            if config.vllm_mode == "colocate"
            else len(config.vllm_server_urls) or config.vllm_servers
        )
        rows = math.ceil(rows * batch.processes / servers)
        room = served_tokens(shape, config, memory_of(kind).total or 0) / (prompt + limit)
        slots, read, value = min(SLOTS, max(1.0, room)), served_weights(shape, config), 2
        between = launch / 10
    steps = max(longest, rows * mean / slots)
    running = rows * mean / steps if config.use_vllm else rows
    context = prompt + mean / 2
    cache = running * context * 2 * shape.layers * shape.kv_heads * shape.head_dim * value / engine
    token = max(forward(running, 2 * context) / flops / engine, (read + cache) / memory) + between
    if not config.use_vllm:
        token += gathered
    prefill = forward(rows / batch.generations * prompt, prompt) / flops / engine
    rollout = prefill + steps * token

    # training: the passes of a process
    passes = math.ceil(batch.share / batch.largest_pass(prompt + math.ceil(mean))[0])
    prompts = batch.share / batch.generations if batch.shares_prompts else batch.share
    once = forward(batch.share * mean + prompts * prompt, prompt + mean) / flops
    recomputed = 0 if config.disable_gradient_checkpointing else 1
    scorings = _scorings(config)
    training = once * (2 + (not config.peft) + recomputed + scorings) + launch * passes * (3 + recomputed + scorings)
    if is_sharded:
        gathers = 2 if fsdp_settings(config, shape.weights).reshard_after_forward else 1
        reduced = 0 if config.peft else 4 * shape.weights * exchanged
        training += passes * ((gathers + scorings) * gathered + reduced)

    moved = 0.0
    if config.weight_sync is not None:  # written to files, and read
        size = weights.trained if config.weight_sync == "adapter" else 2 * shape.weights
        moved = 2 * size / (GIGA * assumed.files) + SYNCED_LAYER * launch + gathered
    elif config.use_vllm:
        moved = (weights.all + 2 * shape.weights) / memory + SYNCED_LAYER * launch + gathered
    own = weights.trained / (batch.processes if is_sharded else 1)
    optimizer = OPTIMIZED * own / memory + (0 if is_sharded else 2 * weights.trained * exchanged)
    updates = config.rl_updates_per_rollout * config.trl_integer("num_iterations", 1)
    parts = {
        "generation": rollout / updates,
        "training passes": training,
        "weight sync": moved / updates,
        "optimizer": optimizer,
    }
    together = min(parts["generation"], training + optimizer) if config.rl_ahead else 0
    return {**parts, "step": sum(parts.values()) - together}
