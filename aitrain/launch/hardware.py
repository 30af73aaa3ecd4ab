"""GPUs and the version of NVIDIA's driver, read from nvidia-smi, and kinds that need not be here."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import takewhile

from aitrain.errors import ConfigError, did_you_mean

PATIENCE = 10.0
"""Timeout of nvidia-smi in seconds."""
QUERY = "--query-gpu=index,name,memory.total,memory.free"
FORMAT = "--format=csv,noheader,nounits"


@dataclass(frozen=True)
class Gpu:
    """One GPU, with its memory in MiB; None if unknown."""

    index: str
    name: str
    total: int | None
    free: int | None


@dataclass(frozen=True)
class Driver:
    """The driver's answer, or why there is none."""

    gpus: tuple[Gpu, ...] = ()
    version: str = ""
    cuda: str = ""
    """The newest version of CUDA that it supports."""
    failure: str = ""


@dataclass(frozen=True)
class GpuKind:
    """What a GPU of one kind can do at most, by the data sheets of NVIDIA."""

    name: str
    memory: int
    """MiB, as the driver says."""
    teraflops: float
    """Of dense matrix products, in bfloat16, or float16 without it."""
    bandwidth: float
    """GB/s of its memory."""
    link: float
    """GB/s to the other GPUs of its machine, in each direction."""
    has_bf16: bool = True


KINDS = {
    kind.name: kind
    for kind in (
        GpuKind("A100-40", 40_960, 312, 1555, 300),
        GpuKind("A100-80", 81_920, 312, 2039, 300),
        GpuKind("H100", 81_559, 989, 3350, 450),
        GpuKind("H200", 143_771, 989, 4800, 450),
        GpuKind("B200", 183_359, 2250, 7700, 900),
        GpuKind("L4", 23_034, 121, 300, 32),
        GpuKind("L40S", 46_068, 362, 864, 32),
        GpuKind("4090", 24_564, 165, 1008, 32),
        GpuKind("T4", 15_360, 65, 320, 16, has_bf16=False),
    )
}


@dataclass(frozen=True)
class Hardware:
    """Machines with GPUs of one kind."""

    kind: GpuKind
    gpus: int
    """Of each machine."""
    machines: int

    @classmethod
    def of(cls, text: str, machines: int) -> Hardware:
        """Machines with the GPUs of a text, `H100` or `H100x8`.

        Raises:
            ConfigError: there is no such kind.
        """
        name, _, count = text.upper().partition("X")
        if name not in KINDS or not re.fullmatch("[1-9][0-9]?", count or "1"):
            raise ConfigError(
                f"gpu: no kind of GPU is called {text}.{did_you_mean(name, KINDS)}\n"
                f"There are {', '.join(KINDS)}; eight of them are written as H100x8, and a machine has at most 99."
            )
        return cls(KINDS[name], int(count or 1), machines)

    def __str__(self) -> str:
        kind, half = self.kind, "bfloat16" if self.kind.has_bf16 else "float16"
        machines = f" in each of {self.machines} machines" if self.machines > 1 else ""
        return (
            f"{self.gpus} x {kind.name}{machines}: {kind.memory / 1024:.1f} GiB, {kind.teraflops:g} TFLOPS in {half},"
            f" {kind.bandwidth:g} GB/s to its memory, {kind.link:g} to its neighbours"
        )


def visible_gpus() -> tuple[str, ...]:
    """Indices of the GPUs that this process may use, by CUDA_VISIBLE_DEVICES or else by the driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        driver = ask_driver()
        return tuple(gpu.index for gpu in driver.gpus) if driver else ()
    named = (name.strip() for name in visible.split(","))
    return tuple(takewhile(lambda name: name not in ("", "-1"), named))  # as CUDA reads it


def ask_driver(versions: bool = False, only: str = "") -> Driver | None:
    """The driver's answer, with `versions` also its own and CUDA's; None if nvidia-smi is not installed. `only` names
    GPUs as CUDA_VISIBLE_DEVICES does."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None

    def ask(*arguments: str) -> tuple[int, str]:
        process = subprocess.Popen(
            [tool, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        try:
            said, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()  # without a wait for its end: what hangs in the driver cannot be killed
            raise
        return process.returncode, said

    try:
        code, answer = ask(QUERY, FORMAT, *([f"--id={only}"] if only else []))
        version = ask("--version")[1] if versions else ""
    except subprocess.TimeoutExpired:
        return Driver(failure=f"no answer within {PATIENCE:g} seconds")
    except OSError as error:
        return Driver(failure=str(error))
    if code and "no devices" not in answer.lower():
        return Driver(failure=answer.strip().partition("\n")[0][:200] or f"exit code {code}")
    rows = csv.reader(answer.splitlines(), skipinitialspace=True)  # `0, NVIDIA H200, 143771, 143164`
    gpus = [
        Gpu(row[0], row[1], *(int(n) if n.isdecimal() else None for n in row[2:]))  # of the system's memory: `[N/A]`
        for row in rows
        if len(row) == 4
    ]
    return Driver(tuple(gpus), _number("driver|kmd", version), _number("cuda|cuda umd", version))


def _number(label: str, versions: str) -> str:
    """The number in `DRIVER version : 580.95.05` or, since 610, `KMD version : 610.43.02`."""
    found = re.search(rf"^\s*(?:{label}) version\s*:\s*(\d[\d.]*)", versions, re.MULTILINE | re.IGNORECASE)
    return found.group(1) if found else ""
