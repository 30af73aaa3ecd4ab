"""Compares what a run needs of memory and disk with what is free: refuses what cannot fit, warns where it is tight."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from aitrain.batch import BatchPlan
from aitrain.errors import ConfigError
from aitrain.launch.machines import Nodes
from aitrain.launch.model_shape import read_model_shape
from aitrain.launch.nvidia import ask_driver
from aitrain.launch.resource_estimate import (
    MIB,
    DeviceMemory,
    estimate_disk,
    estimate_memory,
    memory_savers,
    served_weights,
)
from aitrain.machine import free_memory, total_memory
from aitrain.options.train import TrainConfig

TIGHT = 0.9
"""Estimated share of the free memory above which the user is warned."""
SHOWN = 3
"""Number of flags that the warning names."""
VLLM_CACHE = "VLLM_CPU_KVCACHE_SPACE"
"""Variable of vLLM: GiB of each engine's cache on the CPU."""


def device_memory(gpus: Sequence[str]) -> DeviceMemory:
    """Memory of the fullest of these GPUs, or of the CPU if there are none."""
    if not gpus:
        return DeviceMemory("CPU", free_memory(), total_memory())
    driver = ask_driver()
    known = [gpu for gpu in (driver.gpus if driver else ()) if gpu.free is not None and gpu.total is not None]
    used = [gpu for gpu in known if gpu.index in gpus] or known
    if not used:
        return DeviceMemory("GPU")
    return DeviceMemory("GPU", min(gpu.free or 0 for gpu in used) * MIB, min(gpu.total or 0 for gpu in used) * MIB)


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of a folder that exists or will be made."""
    place = folder.expanduser().absolute()
    while not os.path.exists(place):
        place = place.parent
    return shutil.disk_usage(place).free


def check_resources(
    config: TrainConfig, batch: BatchPlan, gpus: Sequence[str], nodes: Nodes | None = None
) -> list[str]:
    """Warnings if a run may not fit on this machine; none if the model's shape is unknown.

    Raises:
        ConfigError: not even the weights fit into the memory, or the result onto the disk.
    """
    shape = read_model_shape(config.model)
    if shape is None:
        return []
    device = device_memory(gpus)
    memory = estimate_memory(shape, config, batch, device)
    sharing = processes_sharing(batch.processes // (nodes.count if nodes else 1), device)
    if device.free is not None and memory.stay["weights"] * sharing > device.free:
        each = f" for each of {sharing} processes" if sharing > 1 else ""
        raise ConfigError(
            f"model: the weights of {config.model} alone need {format_bytes(memory.stay['weights'])}{each}, and the"
            f" {device.kind} has {format_bytes(device.free)} free\n"
            "Use a smaller model, or fewer bytes per weight: --dtype bfloat16 --peft."
        )
    warnings = []
    if device.free is not None and memory.peak * sharing > TIGHT * device.free:
        helpful = memory_savers(shape, config, batch, device)[:SHOWN]
        way_out = "; ".join(f"{flag} saves {format_bytes(saved)}" for flag, saved in helpful)
        each = f" x {sharing} processes" if sharing > 1 else ""
        warnings.append(
            f"Memory may run out: with the longest episodes about {format_bytes(memory.peak)}{each} are needed,"
            f" {format_bytes(device.free)} are free{f'. {way_out}' if way_out else ''} (aitrain plan shows more)."
        )
    if nodes is None or nodes.rank == 0:  # where it is saved
        wanted, room = estimate_disk(shape, config, batch), free_disk(Path(config.output_dir))
        if wanted.model > room:
            raise ConfigError(
                f"output_dir: the trained model alone needs {format_bytes(wanted.model)}, and {format_bytes(room)} are"
                f" free in {config.output_dir}\nChoose another place with --output-dir, or make room."
            )
        if wanted.total > room:
            warnings.append(
                f"The disk may run full: {format_bytes(wanted.checkpoints)} of checkpoints,"
                f" {format_bytes(wanted.model)} of model, and {format_bytes(room)} are free."
                " --save-total-limit 1, --save-strategy no or another --output-dir help."
            )
    return warnings


def processes_sharing(processes: int, device: DeviceMemory) -> int:
    """Number of processes that share one device's memory, of those on this machine."""
    return processes if device.kind == "CPU" else 1


def format_bytes(count: float) -> str:
    """`312 MiB`, `21.4 GiB`."""
    tenths = round(count) * 10 // (1024 * MIB)  # integers, as options may make it too large for a float
    return f"{round(count) // MIB:,} MiB" if count < 1024 * MIB else f"{tenths // 10:,}.{tenths % 10} GiB"


# -- memory of vLLM, which itself fails only after a minute


def check_vllm_memory(config: TrainConfig, gpus: tuple[str, ...], engines: int) -> None:
    """Check that vLLM's share of each of these GPUs is free and holds a server's weights; without GPUs, that there is
    memory for the caches of all engines.

    Raises:
        ConfigError: there is too little memory.
    """
    driver, share = ask_driver() if gpus else None, config.vllm_memory
    shape = read_model_shape(config.model) if driver and config.starts_vllm_servers else None
    need = served_weights(shape, config) if shape else 0
    for gpu in driver.gpus if driver else ():
        if gpu.index not in gpus or not gpu.total:  # its memory is unknown if it is the system's
            continue
        if gpu.free is not None and gpu.free < share * gpu.total:
            raise ConfigError(
                f"vllm_gpu_memory_utilization: {share:g} of GPU {gpu.index} is {share * gpu.total / 1024:.1f} GiB, and"
                f" {gpu.free / 1024:.1f} of its {gpu.total / 1024:.1f} GiB are free\n"
                "End other processes on it (nvidia-smi lists them), leave it out of CUDA_VISIBLE_DEVICES, or lower the"
                " share."
            )
        if need > share * gpu.total * MIB:
            raise ConfigError(
                f"vllm_gpu_memory_utilization: the weights of {config.model} need {format_bytes(need)} on each GPU of a"
                f" server, and vLLM gets {format_bytes(share * gpu.total * MIB)} of GPU {gpu.index}\n"
                "Divide them over more GPUs (--vllm-tensor-parallel-size, --vllm-server-gpus), or halve them:"
                " --vllm-quantization fp8 with --peft."
            )
    wanted = "" if gpus else os.environ.get(VLLM_CACHE, "")
    free = free_memory() if wanted.isdecimal() else None
    if free is not None and int(wanted) * engines * 1024 * MIB > free:
        raise ConfigError(
            f"{VLLM_CACHE}: {engines} x {wanted} GiB for vLLM's cache, and {format_bytes(free)} of memory are free\n"
            "Set it to fewer GiB, or unset it."
        )
