"""What a run would do on hardware that need not be here: if it fits, the passes of a step, and its seconds, computed
from FLOPs and memory traffic. They are an estimate, for the fast and the slow assumptions below."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from aitrain.batch import schedule_cases
from aitrain.launch.hardware import Hardware
from aitrain.launch.resource_estimate import TIGHT, MemoryEstimate, ResourceEstimate, assumed_lengths

GIGA = 1e9
SLOTS = 256
"""Completions that vLLM generates at a time at most (max_num_seqs)."""
IN_FLOAT32 = 8
"""How much slower products are in float32."""
GRAPH = 0.1
"""Share of the time to launch a layer that is left in vLLM's CUDA graphs."""
SYNCED = 10
"""Tensors of a layer, which a weight sync moves one by one."""
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
    """Milliseconds that a layer takes at least in a forward pass."""
    network: float
    """GB/s from a machine to the others."""
    files: float
    """GB/s to and from files."""


FAST, SLOW = Assumptions(0.3, 0.45, 0.8, 0.5, 400, 3), Assumptions(0.8, 0.15, 0.4, 1.5, 12.5, 0.8)
ASSUMED = (
    f"mean completions of {FAST.length:.0%} to {SLOW.length:.0%} of the limit, {FAST.flops:.0%} to {SLOW.flops:.0%} of"
    f" the FLOPS, {FAST.bandwidth:.0%} to {SLOW.bandwidth:.0%} of the bandwidth, {FAST.launch:g} to {SLOW.launch:g} ms"
    f" to launch a layer, {FAST.network:g} to {SLOW.network:g} GB/s between machines, {FAST.files:g} to {SLOW.files:g}"
    " GB/s to files, no time in the environment"
)


@dataclass(frozen=True)
class HardwareEstimate:
    """What a run needs of hardware, and does there."""

    hardware: Hardware
    memory: MemoryEstimate
    cached_episodes: float | None
    """Longest episodes that vLLM's cache on a GPU holds, below 0 if its weights do not fit; None without vLLM
    that is started here."""
    changes: list[str] | None
    """Flags with which it fits: none if it does as it is; None if there are none."""
    passes: int
    """Forward passes of a process in a step with the longest completions."""
    seconds: Mapping[str, tuple[float, float]]
    """Of the parts of a step, and of the step, at least and at most."""

    @classmethod
    def of(cls, needs: ResourceEstimate, hardware: Hardware) -> HardwareEstimate:
        """The estimate of what such a run needs and does."""
        fast, slow = (_seconds(needs, hardware, assumed) for assumed in (FAST, SLOW))
        return cls(
            hardware,
            needs.memory,
            needs.cached_episodes,
            needs.changes_that_fit(TIGHT * (needs.device.total or 0)),
            needs.batch.passes(sum(assumed_lengths(needs.config))),
            {part: (fast[part], slow[part]) for part in fast},
        )


def _seconds(needs: ResourceEstimate, hardware: Hardware, assumed: Assumptions) -> dict[str, float]:
    """Seconds of the parts of a step, and of the step."""
    shape, config, batch, weights = needs.shape, needs.config, needs.batch, needs.weights
    kind, is_half = hardware.kind, weights.is_mixed or weights.width == 2
    flops = kind.teraflops * 1e12 * assumed.flops / (1 if is_half else IN_FLOAT32)
    memory, launch = kind.bandwidth * GIGA * assumed.bandwidth, shape.layers * assumed.launch / 1000
    link = kind.link if hardware.machines == 1 else min(kind.link, assumed.network)
    exchanged = (batch.processes - 1) / batch.processes / link / GIGA  # a byte that each process gets from the others
    is_sharded, is_served = config.distributed_backend == "fsdp2", config.weight_sync is not None
    gathered = (2 if is_half else 4) * shape.weights * exchanged if is_sharded else 0
    prompt, limit = assumed_lengths(config)
    mean = assumed.length * limit

    def forward(tokens: float, context: float) -> float:
        """Seconds of the operations of tokens that attend to half of the context in the mean."""
        attention = 2 * shape.layers * shape.heads * shape.head_dim * context
        return tokens * (2 * (shape.weights - shape.idle) + attention) / flops

    # a rollout: the prompt of each group, then token by token, for each of which all weights and the cache are read
    schedule = schedule_cases(config, batch)
    rows = schedule.prompts * batch.generations / batch.processes
    slots, gpus, read, value, between = rows, 1, weights.all, weights.width, launch + gathered
    if config.use_vllm:
        gpus, read, value, between = config.vllm_tensor_parallel_size, needs.served_weights, 2, GRAPH * launch
        engines = batch.processes / gpus
        if is_served:
            engines = len(config.vllm_server_urls) or config.vllm_servers
        rows *= batch.processes / engines
        room = needs.cached_episodes
        slots = SLOTS if room is None else min(SLOTS, max(1, room))
    steps = max(min(limit, 2 * mean), rows * mean / slots)
    running = min(rows, slots) if not config.use_vllm else rows * mean / steps
    cache = running * (prompt + mean / 2) * shape.cached_values * value
    token = max(forward(running, 2 * prompt + mean), (read + cache / gpus) * gpus / memory) / gpus + between
    generation = forward(rows / batch.generations * prompt, prompt) / gpus + steps * token

    passes = batch.passes(prompt + math.ceil(mean))
    prompts = batch.share / batch.generations if config.shares_prompts else batch.share
    recomputed = not config.disable_gradient_checkpointing
    # without gradients: for vLLM's correction or later updates, and for the reference
    scorings = (config.use_vllm or schedule.updates > 1) + (config.rl_kl_coef > 0)
    forwards = 1 + recomputed + scorings
    training = forward(batch.share * mean + prompts * prompt, prompt + mean) * (forwards + (1 if config.peft else 2))
    training += passes * (launch * (forwards + 2) + gathered * (2 + scorings))

    sync = SYNCED * launch + gathered if config.use_vllm else 0
    if is_served:  # written, and read
        sync += 2 * (weights.trained if config.weight_sync == "adapter" else 2 * shape.weights) / assumed.files / GIGA
    own = weights.trained / (batch.processes if is_sharded else 1)
    # of the gradients, each process sends and gets a sum
    optimizer = OPTIMIZED * own / memory + 2 * weights.trained * exchanged * (passes if is_sharded else 1)
    parts = {
        "generation": generation / schedule.updates,
        "training passes": training,
        "weight sync": sync / schedule.updates,
        "optimizer": optimizer,
    }
    at_once = min(parts["generation"], training + optimizer) if config.rl_ahead else 0
    return {**parts, "step": sum(parts.values()) - at_once}
