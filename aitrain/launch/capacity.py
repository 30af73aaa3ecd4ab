"""What this machine has free, and whether a run fits into it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from aitrain.batch import BatchPlan
from aitrain.errors import ConfigError
from aitrain.launch.nvidia import ask_driver
from aitrain.launch.room import MIB, Machine, Needs, disk, levers, needs
from aitrain.launch.shape import Shape, read_shape
from aitrain.machine import free_memory, total_memory
from aitrain.options.train import TrainConfig

TIGHT = 0.9
"""Share of the free memory that a run may need by estimate: beyond it a person is warned."""
SHOWN = 3
"""Flags that are named then."""


def machine_for(gpus: Sequence[str]) -> Machine:
    """Where the processes of a run compute: on these GPUs, the fullest of which counts, or on the CPU."""
    if not gpus:
        return Machine("CPU", free_memory(), total_memory())
    driver = ask_driver()
    known = [gpu for gpu in (driver.gpus if driver else ()) if gpu.free is not None and gpu.total is not None]
    used = [gpu for gpu in known if gpu.index in gpus] or known
    if not used:
        return Machine("GPU")
    return Machine("GPU", min(gpu.free or 0 for gpu in used) * MIB, min(gpu.total or 0 for gpu in used) * MIB)


def free_disk(folder: Path) -> int:
    """Bytes that are free where a folder is, or will be made."""
    place = folder.expanduser().absolute()
    while not os.path.exists(place):
        place = place.parent
    return shutil.disk_usage(place).free


def check_room(config: TrainConfig, batch: BatchPlan, gpus: Sequence[str]) -> tuple[str, ...]:
    """Warnings where a run is likely not to fit; none where the model's shape cannot be told.

    Raises:
        ConfigError: not even the weights fit into the memory, or the result onto the disk.
    """
    shape = read_shape(config.model)
    if shape is None:
        return ()
    machine = machine_for(gpus)
    need, sharing = needs(shape, config, batch, machine), processes_sharing(batch, machine)
    _refuse_weights(config, need, sharing)
    return (*_tight_memory(shape, config, batch, need), *_tight_disk(shape, config, batch))


def processes_sharing(batch: BatchPlan, machine: Machine) -> int:
    """How many of the run's processes one such memory is for."""
    return batch.processes if machine.kind == "CPU" else 1


def shown(count: float) -> str:
    """`312 MiB`, `21.4 GiB`."""
    tenths = round(count) * 10 // (1024 * MIB)  # whole numbers, which may be as large as anybody types
    return f"{round(count) // MIB:,} MiB" if count < 1024 * MIB else f"{tenths // 10:,}.{tenths % 10} GiB"


def _refuse_weights(config: TrainConfig, need: Needs, sharing: int) -> None:
    free = need.machine.free
    if free is not None and need.weights * sharing > free:
        each = f" for each of {sharing} processes" if sharing > 1 else ""
        raise ConfigError(
            f"model: the weights of {config.model} alone need {shown(need.weights)}{each}, and the {need.machine.kind}"
            f" has {shown(free)} free\nTake a smaller model, or one with fewer bytes a weight: --dtype bfloat16 --peft."
        )


def _tight_memory(shape: Shape, config: TrainConfig, batch: BatchPlan, need: Needs) -> Iterator[str]:
    free, sharing = need.machine.free, processes_sharing(batch, need.machine)
    if free is None or need.peak * sharing <= TIGHT * free:
        return
    helpful = levers(shape, config, batch, need.machine)[:SHOWN]
    way_out = "; ".join(f"{flag} saves {shown(saved)}" for flag, saved in helpful)
    each = f" x {sharing} processes" if sharing > 1 else ""
    yield (
        f"Memory may run out: with the longest episodes about {shown(need.peak)}{each} are needed, {shown(free)} are"
        f" free{f'. {way_out}' if way_out else ''} (aitrain plan shows more)."
    )


def _tight_disk(shape: Shape, config: TrainConfig, batch: BatchPlan) -> Iterator[str]:
    wanted, free = disk(shape, config, batch), free_disk(Path(config.output_dir))
    if wanted.model > free:
        raise ConfigError(
            f"output_dir: the trained model alone needs {shown(wanted.model)}, and {shown(free)} are free in"
            f" {config.output_dir}\nChoose another place with --output-dir, or make room."
        )
    if wanted.whole > free:
        yield (
            f"The disk may run full: {shown(wanted.checkpoints)} of checkpoints, {shown(wanted.model)} of model, and"
            f" {shown(free)} are free. --save-total-limit 1, --save-strategy no or another --output-dir help."
        )
