"""Estimates of the memory and disk space that a run needs, before anything is loaded, and what follows from them: what
cannot fit is refused, where it is tight the user is warned, and completions share a forward pass as far as they fit.

Memory of one process: what stays (weights, adapter, reference, optimizer) and the largest phase of a step.
tests/test_resources.py compares the estimate with a real training on the CPU. Fragmentation of the allocator is not in
them: some hundred MiB on the CPU, where blocks above 32 MiB are returned to the system.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from aitrain.batch import BatchPlan, plan_batch
from aitrain.errors import ConfigError
from aitrain.launch.hardware import GpuKind, ask_driver
from aitrain.launch.model_shape import ModelShape
from aitrain.machine import free_memory, total_memory
from aitrain.options.train import FSDP_OPTIMIZERS, TrainConfig, pass_dependent, reshards_after_forward

MIB = 1 << 20
PROMPT = 256
"""Assumed tokens of a prompt if --rl-max-prompt-length does not bound it."""
LIBRARIES = {"CPU": 500 * MIB, "GPU": 700 * MIB}
"""Memory of Python, torch and the other libraries; on a GPU, of its context."""
TILE = 4096, 32768
"""Tokens and vocabulary of the tile of logits that TRL computes at a time."""
CPU_TILES = 8
"""Copies of the tile that TRL's backward pass holds without Triton."""
LOGITS = 4
"""Copies of the logits of a batch's next tokens while they are sampled, in float32."""
HELD_OUT = 32
"""Least number of held-out completions generated at a time."""
GRAPHS = 3 << 29
"""Memory of vLLM's activations and CUDA graphs."""
SHARE_OF_VLLM = "vllm_gpu_memory_utilization"


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the device that a process of the run computes on, in bytes; None if unknown."""

    kind: Literal["CPU", "GPU"]
    free: int | None = None
    total: int | None = None
    has_bf16: bool = True

    @property
    def halves(self) -> bool:
        """Whether models compute in half precision on it, unless an option says otherwise."""
        return self.kind == "GPU" and self.has_bf16

    def shared_by(self, processes: int) -> int:
        """How many of the processes of a machine share this memory."""
        return processes if self.kind == "CPU" else 1


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one process needs, by purpose."""

    stay: Mapping[str, int]
    """Held during the whole run."""
    phases: Mapping[str, int]
    """Held for a part of a step; the largest phase counts."""

    @property
    def peak(self) -> int:
        """Maximum bytes at any time."""
        return sum(self.stay.values()) + max(self.phases.values())


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model's weights, and of what is kept for each of those that are trained."""

    width: int
    """Bytes of one weight, as training/model.py chooses them."""
    is_mixed: bool
    """Whether forward passes compute in half precision (autocast), with weights of any format."""
    all: int
    trained: int
    optimizer: int
    """State of the optimizer; Adam keeps two numbers for each trained weight."""

    @classmethod
    def of(cls, shape: ModelShape, config: TrainConfig, halves: bool) -> WeightSizes:
        is_mixed = config.mixed_precision != "no" and (halves or config.mixed_precision is not None)
        if config.dtype == "auto":
            width = 2 if halves and config.may_halve_base else 4
        elif is_mixed and config.distributed_backend == "fsdp2" and not config.peft:
            width = 4  # accelerate converts trained weights
        else:
            width = 4 if config.dtype == "float32" else 2
        packed = {"int4": 0.56, "int8": 1.05}.get(config.quantization or "", width)
        inside = shape.inside - shape.expert_weights  # experts are not packed
        everything = int(inside * packed) + (shape.weights - inside) * width
        wanted = {name.strip() for name in config.target_modules.split(",")}
        sides = (sum(sides) for name, sides in shape.matrices.items() if wanted == {"all-linear"} or name in wanted)
        adapter = config.lora_r * shape.layers * sum(sides)
        each = 4 if config.peft else width
        count = adapter if config.peft else shape.weights
        optimizer = 0 if config.optimizer in ("sgd", "adafactor", "lomo", "adalomo") else 2 * each * count
        if "8bit" in config.optimizer or "4bit" in config.optimizer:
            optimizer = 2 * count
        return cls(width, is_mixed, everything, adapter * 4 if config.peft else everything, optimizer)


def assumed_lengths(config: TrainConfig) -> tuple[int, int]:
    """Tokens of the longest prompt and the longest completion by the options."""
    return config.rl_max_prompt_length or PROMPT, config.rl_max_episode_tokens or config.completion_tokens


@dataclass(frozen=True)
class ResourceEstimate:
    """What each process of a run needs: with these options, for a model of this shape, on this device."""

    shape: ModelShape
    config: TrainConfig
    batch: BatchPlan
    device: DeviceMemory

    def changed(self, **options: object) -> ResourceEstimate:
        """The estimate with other options.

        Raises:
            ConfigError: its batch cannot be divided.
        """
        config = self.config.model_copy(update=options)
        return replace(self, config=config, batch=plan_batch(config, self.batch.processes))

    @property
    def weights(self) -> WeightSizes:
        """Of the trained model."""
        return WeightSizes.of(self.shape, self.config, self.device.halves)

    @property
    def disk(self) -> tuple[int, int]:
        """Bytes of the model and of a checkpoint."""
        weights = WeightSizes.of(self.shape, self.config, halves=False)
        return weights.trained, weights.trained + weights.optimizer

    @cached_property
    def memory(self) -> MemoryEstimate:
        """Of the device."""
        shape, config, batch, device = self.shape, self.config, self.batch, self.device
        weights, on_gpu, processes = self.weights, device.kind == "GPU", batch.processes
        computed = 2 if weights.is_mixed else weights.width  # bytes of a value in a forward pass
        parts = processes if config.distributed_backend == "fsdp2" else 1
        own_weights, own_trained = weights.all // parts, weights.trained // parts
        stay = {
            "libraries": LIBRARIES[device.kind],
            "weights": own_weights,
            "reference": 0 if config.peft or not config.rl_kl_coef else own_weights,
            "adapter": own_trained if config.peft else 0,
            "optimizer": weights.optimizer // parts,
        }
        gradients = own_trained * (2 if parts == 1 and processes > 1 else 1)  # the second copy is to exchange them

        gathered = 0  # whole weights of sharded layers in a pass: embedding and head, and two layers or all of them
        if parts > 1:
            two_layers = 2 * shape.inside // shape.layers
            layers = min(shape.inside, two_layers) if reshards_after_forward(config, shape.weights) else shape.inside
            gathered = (shape.weights - shape.inside + layers) * computed
            if not config.peft:
                gathered += 4 * two_layers  # gradients, before they are sharded

        # autocast copies float32 weights: trained ones until the forward pass ends, those of kept activations until the
        # backward pass does; shared prompts have a graph of their own
        keeps = config.disable_gradient_checkpointing
        casts = weights.is_mixed and weights.width == 4 and parts == 1
        halved = 2 * shape.weights if casts else 0
        cached = 0 if config.peft else halved
        copies = halved * (2 if config.shares_prompts else 1) if keeps else cached

        prompt, completion = assumed_lengths(config)
        generation = 0
        if config.use_vllm and config.vllm_mode == "colocate":
            generation = int((device.total or 0) * config.vllm_memory)
            if not config.vllm_sleep_mode:
                stay["vLLM"], generation = generation, 0
        elif not config.use_vllm:  # transformers: the cache of all completions of a rollout, activations of the prompts
            rows, held_out = batch.share * config.rl_updates_per_rollout, HELD_OUT if config.eval_cases != 0 else 0
            prompts = max(rows // batch.generations if config.share_prefixes else rows, held_out)
            rows = max(rows, held_out)
            cache = rows * shape.cached_values * (prompt + completion)
            first = prompts * prompt * (4 * shape.hidden + 3 * shape.heads * shape.head_dim + 3 * shape.intermediate)
            logits = rows * shape.vocabulary * 4 * LOGITS
            cache *= 2 if casts else weights.width  # AutocastCache
            generation = cache + first * weights.width + logits + gathered + cached

        rows, length = batch.largest_pass(prompt + completion)
        # values for one token that a layer keeps for its backward pass: around the norms, with what autocast copies; of
        # attention, with its mask; of the MLP
        around_norms = (13 if casts and not config.peft else 9) if weights.is_mixed else 6
        layer = around_norms * shape.hidden + 6 * shape.heads * shape.head_dim + length + 4 * shape.intermediate
        whole_layers, inputs = shape.layers, 0
        if not keeps:  # only the input of each layer, and one layer at a time
            whole_layers, inputs = 1, shape.layers * shape.hidden * (4 if casts else computed)
        kept = (whole_layers * layer + 2 * (shape.intermediate + shape.hidden)) * computed
        activations = rows * length * (kept + inputs)
        if on_gpu:
            tile = min(rows * min(length, completion), TILE[0]) * TILE[1] * computed
        else:
            tile = min(rows * length, TILE[0]) * min(shape.vocabulary, TILE[1]) * 4 * CPU_TILES
        added_up = 0 if config.peft else 2 * shape.vocabulary * shape.hidden * 4  # gradients of embedding and head
        training = gradients + copies + activations + tile + added_up + gathered
        phases = {"generation": generation, "training pass": training}
        if on_gpu:
            phases["optimizer's step"] = gradients + own_trained  # it works on all weights at once, with a copy
        return MemoryEstimate(stay, phases)

    # -- vLLM

    @property
    def served_weights(self) -> int:
        """Bytes of the weights on each GPU of a vLLM server."""
        config = self.config
        return self.shape.weights * (4 if config.dtype == "float32" else 2) // config.vllm_tensor_parallel_size

    @property
    def cached_episodes(self) -> float | None:
        """The longest episodes that vLLM has room for in its share of a GPU; below 0 if the weights do not fit. None if
        the run starts none, or the GPU's size is unknown."""
        config, total = self.config, self.device.total
        if not config.use_vllm or config.vllm_server_url is not None or self.device.kind == "CPU" or total is None:
            return None
        room = (config.vllm_memory * total - GRAPHS - self.served_weights) * config.vllm_tensor_parallel_size
        return room / (2 * self.shape.cached_values * sum(assumed_lengths(config)))

    @property
    def lacks_room_for_vllm(self) -> bool:
        """Whether vLLM would not start on such a GPU, as its share does not hold the weights and a longest episode."""
        return self.cached_episodes is not None and self.cached_episodes < 1

    # -- what saves memory

    def changes_that_fit(self, allowed: float) -> list[str] | None:
        """Flags with which a process needs at most this many bytes, and vLLM has room for an episode: none if that is
        so; the first one that suffices; or the one that saves most, and what then suffices. None if nothing does."""

        def need(options: Mapping[str, object]) -> float:
            try:
                changed = self.changed(**options)
            except ConfigError:
                return math.inf
            return math.inf if changed.lacks_room_for_vllm else changed.memory.peak

        chosen: dict[str, object] = {}
        while (needed := need(chosen)) > allowed:
            further = [{**chosen, **one} for one in self.changed(**chosen)._changes() if next(iter(one)) not in chosen]
            further = [each for each in further if need(each) < needed]
            if not further:
                return None
            enough = [each for each in further if need(each) <= allowed]
            chosen = enough[0] if enough else min(further, key=need)
        return [_flag(name, value) for name, value in chosen.items() if getattr(self.config, name) != value]

    def _changes(self) -> Iterator[Mapping[str, object]]:
        """Options that save memory and are not set yet, together where one needs another; the one that changes least of
        the training first."""
        config, batch, on_gpu = self.config, self.batch, self.device.kind == "GPU"
        is_ddp = config.distributed_backend == "ddp"
        if self.lacks_room_for_vllm:
            for percent in range(5, 95, 5):
                yield {SHARE_OF_VLLM: percent / 100}
        if config.disable_gradient_checkpointing:
            yield {"disable_gradient_checkpointing": False}
        if batch.limit.tokens is not None and batch.limit.tokens > 1:
            yield {"tokens_per_pass": batch.limit.tokens // 2}
        elif batch.limit.completions > 1:
            yield {"batch_size": batch.limit.completions // 2, "rl_prompts_per_step": batch.prompts_per_step}
        if on_gpu and config.use_vllm and config.vllm_mode == "colocate" and not config.vllm_sleep_mode:
            yield {"vllm_sleep_mode": True}
        if is_ddp and batch.processes > 1 and on_gpu and not config.quantization:
            optimizer = config.optimizer if config.optimizer in FSDP_OPTIMIZERS else FSDP_OPTIMIZERS[0]
            yield {"distributed_backend": "fsdp2", "optimizer": optimizer}
        if not config.peft and config.rl_kl_coef:
            yield {"rl_kl_coef": 0}
        if not config.peft:
            yield {"peft": True}
        if on_gpu and config.dtype == "auto" and not config.may_halve_base and self.device.has_bf16:
            yield {"dtype": "bfloat16"}
        if on_gpu and is_ddp and config.quantization is None and config.may_halve_base:
            yield {"quantization": "int4"}
        if batch.prompts_per_step > 1 and not config.use_vllm:
            yield {"rl_prompts_per_step": batch.prompts_per_step // 2}
        if config.rl_max_episode_tokens:
            yield {"rl_max_episode_tokens": config.rl_max_episode_tokens // 2}
        elif config.rl_max_new_tokens > 1:
            yield {"rl_max_new_tokens": config.rl_max_new_tokens // 2}


def _flag(name: str, value: object) -> str:
    name = name.replace("_", "-")
    return f"--{'' if value else 'no-'}{name}" if isinstance(value, bool) else f"--{name} {value}"


# -- completions of a forward pass

EXTRA = 2 << 30
"""On the CPU, bytes that larger passes may need, in all processes, beyond what a run with the smallest ones needs."""
SHARE = 0.8
"""Share of a GPU's memory that the estimated peak may take."""
LARGEST = 4096
"""Completions of a pass at most: larger ones save no time."""
KEEPS = "disable_gradient_checkpointing"


def choose_batch_size(
    config: TrainConfig,
    processes: int,
    shape: ModelShape | None,
    device: DeviceMemory,
    recorded: Mapping[str, object] | None = None,
) -> TrainConfig:
    """The options with a batch_size, if none is given and the result does not depend on it; and without gradient
    checkpointing, if that is not given and a pass with a whole group fits so. A resumed run takes both from its
    checkpoint, whose options are `recorded`.

    A large pass takes a fraction of the time of many small ones, and the gradient is the same; the completions of a
    step and their order are not changed. The choice depends on the options, the model's shape and the device's size
    only, not on the memory that is free, so that a repeated run has the same passes.
    """
    given = config.model_fields_set
    is_fixed = config.batch_size is not None or pass_dependent(config)
    is_fixed |= bool({"gradient_accumulation", "tokens_per_pass"} & given)
    try:
        plan = plan_batch(config, processes)
    except ConfigError:
        return config  # preflight says so

    def with_size(size: int) -> dict[str, object]:
        return {"batch_size": size, "rl_prompts_per_step": plan.prompts_per_step}

    if recorded is not None:
        before = recorded.get("batch_size")
        resumed = with_size(before) if isinstance(before, int) and not is_fixed else {}
        kept = {} if KEEPS in given else {KEEPS: recorded.get(KEEPS, False)}
        return config.model_copy(update={**resumed, **kept})
    if shape is None or (device.kind == "GPU" and device.total is None):
        return config
    needs = ResourceEstimate(shape, config, plan, device)
    fitting = (size for size in range(min(plan.share, LARGEST), 0, -1) if plan.share % size == 0)
    sizes = [needs] if is_fixed else [needs.changed(**with_size(size)) for size in fitting]
    allowed = SHARE * (device.total or 0) if device.kind == "GPU" else sizes[-1].memory.peak + EXTRA // processes
    if KEEPS not in given:
        group = 0 if is_fixed else min(plan.share, plan.generations)
        keeping = (one.changed(**{KEEPS: True}) for one in sizes)
        sizes = [one for one in keeping if one.batch.limit.completions >= group] + sizes
    return next((one for one in sizes if one.memory.peak <= allowed), sizes[-1]).config


# -- this machine

TIGHT = 0.9
"""Estimated share of the free memory above which the user is warned."""


def memory_of(kind: GpuKind) -> DeviceMemory:
    """Memory of a GPU of this kind, of which nothing is in use."""
    return DeviceMemory("GPU", kind.memory * MIB, kind.memory * MIB, kind.has_bf16)


def device_memory(gpus: Sequence[str]) -> DeviceMemory:
    """Memory of the fullest of these GPUs, or of the CPU if there are none."""
    if not gpus:
        return DeviceMemory("CPU", free_memory(), total_memory())
    driver = ask_driver(only=",".join(gpus))
    used = [gpu for gpu in (driver.gpus if driver else ()) if gpu.free is not None and gpu.total is not None]
    if not used:  # such as a part of a GPU, of which nvidia-smi does not tell
        return DeviceMemory("GPU")
    return DeviceMemory("GPU", min(gpu.free or 0 for gpu in used) * MIB, min(gpu.total or 0 for gpu in used) * MIB)


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of a folder that exists or will be made."""
    place = Path(os.path.expanduser(folder)).absolute()  # also where there is no such user
    while not os.path.exists(place):
        place = place.parent
    return shutil.disk_usage(place).free


def check_resources(needs: ResourceEstimate, processes: int = 1, saves: bool = True) -> list[str]:
    """Warnings if a run, with this number of processes here, may not fit on this machine, where its folder is if it
    `saves`.

    Raises:
        ConfigError: not even the weights fit into the memory.
    """
    config, device, memory, sharing = needs.config, needs.device, needs.memory, needs.device.shared_by(processes)
    if device.free is not None and memory.stay["weights"] * sharing > device.free:
        each = f" for each of {sharing} processes" if sharing > 1 else ""
        raise ConfigError(
            f"model: the weights of {config.model} alone need {format_bytes(memory.stay['weights'])}{each}, and the"
            f" {device.kind} has {format_bytes(device.free)} free\n"
            "Use a smaller model, or fewer bytes per weight: --dtype bfloat16 --peft."
        )
    warnings = []
    if device.free is not None and memory.peak * sharing > TIGHT * device.free:
        changes = needs.changes_that_fit(TIGHT * device.free / sharing)
        way_out = f"It fits with {' '.join(changes)}." if changes else "aitrain plan shows what needs it."
        each = f" x {sharing} processes" if sharing > 1 else ""
        warnings.append(
            f"Memory may run out: with the longest episodes about {format_bytes(memory.peak)}{each} are needed,"
            f" {format_bytes(device.free)} are free. {way_out}"
        )
    if needs.lacks_room_for_vllm:
        warnings.append(
            f"vLLM may not start: its {config.vllm_memory:.0%} of the GPU do not hold the weights and one longest"
            " episode. Raise --vllm-gpu-memory-utilization, or divide the model with --vllm-tensor-parallel-size."
        )
    if saves:
        (model, checkpoint), room = needs.disk, free_disk(Path(config.output_dir))
        if model + 2 * checkpoint > room:  # one is kept while the next is written
            warnings.append(
                f"The disk may run full: a checkpoint has {format_bytes(checkpoint)}, the model {format_bytes(model)},"
                f" and {format_bytes(room)} are free. --save-total-limit 1 or another --output-dir help."
            )
    return warnings


def format_bytes(count: float) -> str:
    """`312 MiB`, `21.4 GiB`."""
    tenths = round(count) * 10 // (1024 * MIB)  # integers, as options may make it too large for a float
    return f"{round(count) // MIB:,} MiB" if count < 1024 * MIB else f"{tenths // 10:,}.{tenths % 10} GiB"
