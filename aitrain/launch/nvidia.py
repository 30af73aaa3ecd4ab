"""GPUs, their use, and the version of NVIDIA's driver, read from nvidia-smi."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass

PATIENCE = 10.0
"""Timeout of nvidia-smi in seconds."""
QUERY = ("--query-gpu=index,name,memory.total,memory.free", "--format=csv,noheader,nounits")
USE_QUERY = ("--query-gpu=index,utilization.gpu,memory.used", "--format=csv,noheader,nounits")


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


def visible_gpus() -> tuple[str, ...]:
    """Indices of the GPUs that this process may use, by CUDA_VISIBLE_DEVICES or else by the driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        driver = ask_driver()
        return tuple(gpu.index for gpu in driver.gpus) if driver else ()
    named = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(named) if "-1" not in named else tuple(named[: named.index("-1")])


def ask_driver(versions: bool = False) -> Driver | None:
    """The driver's answer, with `versions` also its own and CUDA's; None if nvidia-smi is not installed."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        code, answer = _ask(tool, *QUERY)
        if code and "no devices" not in answer.lower():
            lines = [line.strip()[:200] for line in answer.splitlines() if line.strip()]
            return Driver(failure=lines[0] if lines else f"nvidia-smi ended with exit code {code}")
        _, version = _ask(tool, "--version") if versions else (0, "")
    except subprocess.TimeoutExpired:
        return Driver(failure=f"nvidia-smi did not answer within {PATIENCE:g} seconds")
    except OSError as error:
        return Driver(failure=f"nvidia-smi cannot be run: {error.strerror or error}")
    gpus = tuple(gpu for gpu in map(_gpu, answer.splitlines()) if gpu is not None)
    return Driver(gpus, _number("driver|kmd", version), _number("cuda|cuda umd", version))


def gpu_use() -> dict[str, tuple[float | None, float | None]] | None:
    """Use from 0 to 1 and memory in GiB, by index, of the GPUs that CUDA_VISIBLE_DEVICES names, or of all without it;
    None if nvidia-smi is not installed or fails."""
    tool, visible = shutil.which("nvidia-smi"), os.environ.get("CUDA_VISIBLE_DEVICES")
    if tool is None or visible in ("", "-1"):
        return None
    try:
        code, answer = _ask(tool, *USE_QUERY, *([f"--id={visible}"] if visible else []))
    except (subprocess.TimeoutExpired, OSError):
        return None
    rows = [[field.strip() for field in line.split(",")] for line in answer.splitlines()]
    found = {row[0]: (_scaled(row[1], 100), _scaled(row[2], 1024)) for row in rows if len(row) == 3}
    return found if code == 0 else None


def _scaled(field: str, by: float) -> float | None:
    """A number divided by another one; None for `[N/A]`."""
    return round(float(field) / by, 3) if field.isdecimal() else None


def _ask(tool: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output. A process that hangs in the kernel cannot be killed and is left behind."""
    process = subprocess.Popen(
        [tool, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        answer, _ = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        if process.stdout:
            process.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        raise
    return process.returncode, answer


def _gpu(line: str) -> Gpu | None:
    """Parses `0, NVIDIA H200, 143771, 143164`; memory is `[N/A]` if it is the system's."""
    index, _, rest = line.partition(",")
    fields = [field.strip() for field in rest.rsplit(",", 2)]
    if not index.strip().isdecimal() or len(fields) != 3:
        return None
    total, free = (int(field) if field.isdecimal() else None for field in fields[1:])
    return Gpu(index.strip(), fields[0], total, free)


def _number(label: str, versions: str) -> str:
    """The number in `DRIVER version : 580.95.05` or, since 610, `KMD version : 610.43.02`."""
    found = re.search(rf"^\s*(?:{label}) version\s*:\s*(\d[\d.]*)", versions, re.MULTILINE | re.IGNORECASE)
    return found.group(1) if found else ""
