"""Estimates of the memory and disk space that a run needs, before anything is loaded; what follows from them: options
that save memory, and how many completions share a forward pass.

Memory of one process: what stays (weights, adapter, reference, optimizer) and the largest phase of a step.
tests/test_resources.py compares the estimate with a real training on the CPU. Fragmentation of the allocator is not in
them: some hundred MiB on the CPU, where blocks above 32 MiB are returned to the system.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from aitrain.batch import BatchPlan, plan_batch
from aitrain.errors import ConfigError
from aitrain.launch.model_shape import ModelShape
from aitrain.options.fsdp_settings import fsdp_settings
from aitrain.options.train import TrainConfig, pass_dependent

MIB = 1 << 20
PROMPT = 256
"""Assumed tokens of a prompt if --rl-max-prompt-length does not bound it."""
LIBRARIES = {"CPU": 500 * MIB, "GPU": 700 * MIB}
"""Memory of Python, torch and the other libraries; on a GPU, of its context."""
TILE = 4096, 32768
"""Tokens and vocabulary of the tile of logits that TRL computes at a time."""
CPU_TILES = 8
"""Copies of the tile that TRL's backward pass holds without Triton."""
HELD_OUT = 32
"""Least number of held-out completions generated at a time."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the device that a process of the run computes on, in bytes; None if unknown."""

    kind: Literal["CPU", "GPU"]
    free: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one process needs, by purpose."""

    stay: Mapping[str, int]
    """Held during the whole run."""
    phases: Mapping[str, int]
    """Held for a part of a step; the largest phase counts."""
    merging: int
    """Held at the end of the run, while the adapter is merged."""

    @property
    def peak(self) -> int:
        """Maximum bytes at any time."""
        return max(sum(self.stay.values()) + max(self.phases.values()), self.merging)


def estimate_memory(shape: ModelShape, config: TrainConfig, batch: BatchPlan, device: DeviceMemory) -> MemoryEstimate:
    """Memory that each process of a run needs on its device."""
    sizes = _Sizes(shape, config, batch, device)
    own_weights = sizes.weights // sizes.weight_parts
    stay = {
        "libraries": LIBRARIES[device.kind],
        "weights": own_weights,
        "reference": 0 if config.peft or not config.rl_kl_coef else own_weights,
        "adapter": sizes.adapter * 4 // sizes.weight_parts,
        "optimizer": sizes.optimizer // sizes.state_parts,
    }
    phases = {
        "generation": sizes.generation + (0 if config.use_vllm else sizes.gathered),
        "training pass": sizes.gradients + sizes.training_pass + sizes.gathered,
    }
    if sizes.on_gpu:
        phases["optimizer's step"] = 2 * sizes.gradients  # it works on all weights at once, with a copy
    is_merged = config.peft and config.merge_adapter and not sizes.on_gpu
    merging = stay["libraries"] + sizes.weights + shape.weights * sizes.width if is_merged else 0
    return MemoryEstimate(stay, phases, merging)


@dataclass(frozen=True)
class _Sizes:
    shape: ModelShape
    config: TrainConfig
    batch: BatchPlan
    device: DeviceMemory

    # -- what stays

    @property
    def on_gpu(self) -> bool:
        return self.device.kind == "GPU"

    @property
    def width(self) -> int:
        """Bytes of a weight, as training/model.py chooses them."""
        config = self.config
        if config.dtype == "auto":
            return 2 if self.on_gpu and config.may_halve_base else 4
        if self.is_mixed and config.distributed_backend == "fsdp2" and not config.peft:
            return 4  # accelerate converts trained weights
        return 4 if config.dtype == "float32" else 2

    @property
    def is_mixed(self) -> bool:
        """Whether forward passes compute in half precision, with weights of any type; on a GPU, unless it is off."""
        return self.config.mixed_precision != "no" and (self.on_gpu or self.config.mixed_precision is not None)

    @property
    def computed(self) -> int:
        """Bytes of a value in a forward pass."""
        return 2 if self.on_gpu and self.is_mixed else self.width

    @property
    def weights(self) -> int:
        packed = {"int4": 0.56, "int8": 1.05}.get(self.config.quantization or "")
        if packed is None:
            return self.shape.weights * self.width
        inside = sum(linear.weights for linear in self.shape.linears)
        return int(inside * packed) + (self.shape.weights - inside) * self.width

    @property
    def weight_parts(self) -> int:
        """Processes that the weights are sharded over."""
        return self.batch.processes if self.config.distributed_backend == "fsdp2" else 1

    @property
    def state_parts(self) -> int:
        """Processes that gradients and the optimizer's state are sharded over."""
        return 1 if self.config.distributed_backend == "ddp" else self.batch.processes

    @property
    def gathered(self) -> int:
        """Whole weights of sharded layers in a pass: embedding and head, and two layers or all of them."""
        if self.weight_parts == 1:
            return 0
        inside = sum(linear.weights for linear in self.shape.linears)
        keeps_all = not fsdp_settings(self.config, self.shape.weights).reshard_after_forward
        layers = inside if keeps_all else min(inside, 2 * inside // self.shape.layers)
        trained = 0 if self.config.peft else 4 * 2 * inside // self.shape.layers  # gradients, before they are sharded
        return (self.shape.weights - inside + layers) * self.computed + trained

    @cached_property
    def adapter(self) -> int:
        """Weights of the adapter."""
        if not self.config.peft:
            return 0
        wanted = {name.strip() for name in self.config.target_modules.split(",")}
        named = (linear for linear in self.shape.linears if wanted == {"all-linear"} or linear.name in wanted)
        return self.config.lora_r * sum(linear.sides for linear in named)

    @property
    def gradients(self) -> int:
        """Gradients of the trained weights; without sharding, several processes hold a second copy to exchange them."""
        trained = self.adapter * 4 if self.config.peft else self.weights
        if self.state_parts > 1:
            return trained // self.state_parts
        return trained * (2 if self.batch.processes > 1 else 1)

    @property
    def optimizer(self) -> int:
        """State of the optimizer; Adam keeps two numbers for each trained weight."""
        name, trained = self.config.optimizer, self.adapter or self.shape.weights
        width = 4 if self.config.peft else self.width
        if "8bit" in name or "4bit" in name:
            return 2 * trained
        return 0 if name in ("sgd", "adafactor", "lomo", "adalomo") else 2 * width * trained

    # -- what a phase needs

    @property
    def prompt(self) -> int:
        return self.config.rl_max_prompt_length or PROMPT

    @property
    def completion(self) -> int:
        return self.config.rl_max_episode_tokens or self.config.rl_max_new_tokens

    @property
    def training_pass(self) -> int:
        """Activations of one micro-batch, TRL's tile of logits, and gradients of embedding and head to be added up."""
        shape, (rows, length) = self.shape, self.batch.largest_pass(self.prompt + self.completion)
        # values for one token that a layer keeps for its backward pass: around the norms, of attention, of the MLP
        layer = 6 * shape.hidden + 3 * shape.heads * shape.head_dim + 4 * shape.intermediate
        whole_layers = shape.layers if self.config.disable_gradient_checkpointing else 1
        inputs = 0 if self.config.disable_gradient_checkpointing else shape.layers * shape.hidden
        kept = whole_layers * layer + inputs + 2 * (shape.intermediate + shape.hidden)
        activations = rows * length * kept * self.computed
        if self.config.attn_implementation == "eager":
            activations += 3 * rows * shape.heads * length**2 * self.computed * whole_layers
        if self.on_gpu:
            tile = min(rows * min(length, self.completion), TILE[0]) * TILE[1] * self.computed
        else:
            tile = min(rows * length, TILE[0]) * min(shape.vocabulary, TILE[1]) * 4 * CPU_TILES
        return activations + tile + (0 if self.config.peft else 2 * shape.vocabulary * shape.hidden * 4)

    @property
    def generation(self) -> int:
        """transformers' cache of all completions of a rollout, activations of the prompts; vLLM's share of the GPU."""
        config, shape = self.config, self.shape
        if config.use_vllm:
            shares = config.vllm_mode == "colocate" and not config.vllm_sleep_mode
            return int((self.device.total or 0) * config.vllm_memory) if shares else 0
        rows = max(self.batch.share * config.rl_updates_per_rollout, HELD_OUT if config.eval_cases != 0 else 0)
        cache = 2 * shape.layers * shape.kv_heads * shape.head_dim * (self.prompt + self.completion) * self.width
        first = self.prompt * (4 * shape.hidden + 3 * shape.heads * shape.head_dim + 3 * shape.intermediate)
        return rows * (cache + first * self.width)


def served_weights(shape: ModelShape, config: TrainConfig) -> int:
    """Bytes of the weights on each GPU of a vLLM server, which rounds those inside the layers to one byte with fp8."""
    is_rounded = config.vllm_quantization is not None
    inside = sum(linear.weights for linear in shape.linears) if is_rounded else 0
    width = 4 if config.dtype == "float32" and not is_rounded else 2
    return ((shape.weights - inside) * width + inside) // config.vllm_tensor_parallel_size


# -- what saves memory


def memory_savers(
    shape: ModelShape, config: TrainConfig, batch: BatchPlan, device: DeviceMemory
) -> list[tuple[str, int]]:
    """Flags and the bytes that each of them saves in a process, the largest first."""

    def peak(config: TrainConfig, batch: BatchPlan) -> int:
        return estimate_memory(shape, config, batch, device).peak

    now, saved = peak(config, batch), dict[str, int]()
    for flag, values in _flags(config, batch, device):
        changed = config.model_copy(update=values)
        with suppress(ConfigError):  # the batch cannot be divided any more
            saved[flag] = now - peak(changed, plan_batch(changed, batch.processes))
    return sorted(((flag, much) for flag, much in saved.items() if much > now // 50), key=lambda pair: -pair[1])


def _flags(config: TrainConfig, batch: BatchPlan, device: DeviceMemory) -> Iterator[tuple[str, dict[str, object]]]:
    """Each flag that is not given yet, with the options that it sets."""
    if config.distributed_backend == "ddp" and batch.processes > 1 and device.kind == "GPU" and not config.quantization:
        yield "--distributed-backend fsdp2", {"distributed_backend": "fsdp2"}
    if not config.peft:
        yield "--peft", {"peft": True}
        if config.rl_kl_coef:
            yield "--rl-kl-coef 0", {"rl_kl_coef": 0.0}
    if config.disable_gradient_checkpointing:
        yield "--no-disable-gradient-checkpointing", {"disable_gradient_checkpointing": False}
    if batch.limit.tokens is not None and batch.limit.tokens > 1:
        yield f"--tokens-per-pass {batch.limit.tokens // 2}", {"tokens_per_pass": batch.limit.tokens // 2}
    elif batch.limit.completions > 1:
        smaller = batch.limit.completions // 2
        kept: dict[str, object] = {"batch_size": smaller, "rl_prompts_per_step": batch.prompts_per_step}
        flag = "" if config.rl_prompts_per_step else f" --rl-prompts-per-step {batch.prompts_per_step}"
        yield f"--batch-size {smaller}{flag}", kept
    if batch.prompts_per_step > 1 and not config.use_vllm:
        fewer = batch.prompts_per_step // 2
        yield f"--rl-prompts-per-step {fewer}", {"rl_prompts_per_step": fewer}
    if config.rl_max_episode_tokens:
        fewer = config.rl_max_episode_tokens // 2
        yield f"--rl-max-episode-tokens {fewer}", {"rl_max_episode_tokens": fewer}
    elif config.rl_max_new_tokens > 1:
        fewer = config.rl_max_new_tokens // 2
        yield f"--rl-max-new-tokens {fewer}", {"rl_max_new_tokens": fewer}
    if config.peft and config.merge_adapter:
        yield "--no-merge-adapter", {"merge_adapter": False}


# -- completions of a forward pass

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
    its checkpoint, whose options are `recorded`.

    A large pass takes a fraction of the time of many small ones, and the gradient is the same; the completions of a
    step and their order are not changed. The choice depends on the options, the model's shape and the device's size
    only, not on the memory that is free, so that a repeated run has the same passes.
    """
    before = recorded.get("batch_size") if recorded is not None else None
    is_given = config.batch_size is not None or config.tokens_per_pass is not None
    if is_given or "gradient_accumulation" in config.model_fields_set or pass_dependent(config):
        return config
    try:
        plan = plan_batch(config, processes)
    except ConfigError:
        return config  # preflight says so

    def with_size(size: int) -> TrainConfig:
        return config.model_copy(update={"batch_size": size, "rl_prompts_per_step": plan.prompts_per_step})

    if isinstance(before, int):
        return with_size(before)
    if recorded is not None or shape is None or (device.kind == "GPU" and device.total is None):
        return config
    sizes = [with_size(size) for size in range(min(plan.share, LARGEST), 0, -1) if plan.share % size == 0]
    whole = replace(device, free=device.total)
    peaks = [estimate_memory(shape, each, plan_batch(each, processes), whole).peak for each in sizes]
    allowed = SHARE * (device.total or 0) if device.kind == "GPU" else peaks[-1] + EXTRA // processes
    return next((each for each, peak in zip(sizes, peaks, strict=True) if peak <= allowed), sizes[-1])


# -- disk

LETTERS = 4
"""Bytes of a token in a rollout record, which has each completion twice."""
RECORD = 1024
"""Other bytes of a record."""


@dataclass(frozen=True)
class DiskEstimate:
    """Bytes of the run folder at its largest."""

    model: int
    checkpoint: int
    """One checkpoint; 0 if none is written."""
    checkpoints: int
    rollouts: int | None
    """None if the number of steps is not known."""

    @property
    def total(self) -> int:
        return self.model + self.checkpoints + (self.rollouts or 0)


def estimate_disk(shape: ModelShape, config: TrainConfig, batch: BatchPlan) -> DiskEstimate:
    """Disk space of model, records and checkpoints; while a checkpoint is written, there is one more than is kept."""
    sizes = _Sizes(shape, config, batch, DeviceMemory("CPU"))
    trained = sizes.adapter * 4 if config.peft else sizes.weights
    merged = shape.weights * sizes.width if config.peft and config.merge_adapter else 0
    one = 0 if config.save_strategy == "no" else trained + sizes.optimizer
    reference = sizes.weights if one and config.trl.get("sync_ref_model") else 0
    if config.save_total_limit is not None:
        kept = config.save_total_limit + 1
    elif config.save_strategy == "steps" and config.max_steps is not None:
        kept = max(1, config.max_steps // config.save_steps)
    else:
        kept = config.epochs
    record = 2 * sizes.completion * LETTERS + RECORD
    rollouts = None if config.max_steps is None else config.max_steps * batch.completions_per_step * record
    return DiskEstimate(trained + merged, one + reference, (one + reference) * kept, rollouts)
