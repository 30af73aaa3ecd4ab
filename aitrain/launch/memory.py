"""Whether there is memory for vLLM, looked at before anything is started: vLLM itself would say so after a minute."""

from __future__ import annotations

import os

from aitrain.errors import ConfigError
from aitrain.launch.nvidia import Gpu, ask_driver
from aitrain.machine import free_memory
from aitrain.options.train import TrainConfig

GIB = 2**30
CACHE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's own variable: GiB of the cache of each engine on the CPU."""


def check_memory(config: TrainConfig, gpus: tuple[str, ...], engines: int) -> None:
    """Whether each of these GPUs has free what vLLM will take of it; without GPUs the machine, for so many engines.

    Raises:
        ConfigError: there is too little.
    """
    if not gpus:
        _check_main_memory(engines)
        return
    driver = ask_driver()
    known = {gpu.index: gpu for gpu in driver.gpus} if driver else {}
    for name in gpus:
        if name in known:
            _check_gpu(known[name], config.vllm_memory)


def _check_gpu(gpu: Gpu, share: float) -> None:
    """Memory that is the system's own is not told."""
    if gpu.total is None or gpu.free is None or gpu.free >= share * gpu.total:
        return
    raise ConfigError(
        f"vllm_gpu_memory_utilization: {share:g} of GPU {gpu.index} is {share * gpu.total / 1024:.1f} GiB, and"
        f" {gpu.free / 1024:.1f} of its {gpu.total / 1024:.1f} GiB are free\n"
        "End what else runs on it (nvidia-smi names it), leave it out of CUDA_VISIBLE_DEVICES, or lower the share."
    )


def _check_main_memory(engines: int) -> None:
    wanted, free = os.environ.get(CACHE, ""), free_memory()
    if wanted.isdecimal() and free is not None and int(wanted) * engines * GIB > free:
        raise ConfigError(
            f"{CACHE}: {engines} x {wanted} GiB for vLLM's cache, and {free / GIB:.1f} GiB of memory are free\n"
            "Set it to fewer GiB, or unset it."
        )
