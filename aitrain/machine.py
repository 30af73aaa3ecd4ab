"""CPU cores, memory and open files that this process may use, within its CPU affinity and the limits of its control
groups."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
PARTS = ("quota", "period")
"""The two numbers of a CPU limit, in version 1 of control groups."""

# -- cores


def usable_cores() -> int:
    """Number of cores, at least 1; a quota of 2.5 cores counts as 2."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cores, *_quotas()])))


def _quotas() -> Iterator[float]:
    """CPU limit, in cores, of each control group of this process that has one."""
    for folder in _groups("cpu"):
        parts = _read(folder / "cpu.max").split() or [_read(folder / f"cpu.cfs_{part}_us") for part in PARTS]
        try:
            quota, period = map(int, parts)
        except ValueError:  # `max 100000`: no limit
            continue
        if quota > 0 and period > 0:  # version 1 has -1 for no limit
            yield quota / period


# -- memory, in bytes


def total_memory() -> int | None:
    """Maximum memory in bytes that this process may use; None if unknown."""
    system = _system_memory()
    return None if system is None else min([system[0], *(limit for limit, _ in _memory_groups())])


def free_memory() -> int | None:
    """Memory in bytes that can still be allocated, within the limits of control groups."""
    system = _system_memory()
    return None if system is None else min([system[1], *(max(0, limit - used) for limit, used in _memory_groups())])


def _system_memory() -> tuple[int, int] | None:
    """Total and available memory, without the limits of containers."""
    lines = dict(line.split(":", 1) for line in _read(PROC / "meminfo").splitlines() if ":" in line)
    found = [lines.get(name, "").split() for name in ("MemTotal", "MemAvailable")]
    if all(parts and parts[0].isdecimal() for parts in found):
        return int(found[0][0]) * 1024, int(found[1][0]) * 1024
    import psutil  # here, as it takes a sixth of the time of `aitrain plan`: for systems without these two lines

    try:
        with warnings.catch_warnings(action="ignore"):  # of a kernel that leaves out figures we do not read
            memory = psutil.virtual_memory()
    except (OSError, KeyError):
        return None
    return memory.total, memory.available


def _memory_groups() -> Iterator[tuple[int, int]]:
    """Limit and use of each control group that has a limit. Cached files do not count: the kernel drops them."""
    for folder in _groups("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
        cached = stat.get("total_inactive_file") or stat.get("inactive_file") or "0"
        if limit.isdecimal() and used.isdecimal():
            yield int(limit), max(0, int(used) - int(cached))


# -- open files


def allow_open_files(wanted: int = 8192) -> int:
    """Raise the limit of open files, which is 1,024 on most systems, to this if the system allows it; returns the
    limit."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return wanted if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


# -- control groups


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's control groups, innermost first, in both versions of the kernel's interface.

    A group's limit holds for the groups inside it. A container may see its own group as the root.
    """
    for line in _read(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = CGROUPS
        elif controller in controllers.split(","):
            root = next((one for one in (CGROUPS / controllers, CGROUPS / controller) if one.is_dir()), CGROUPS)
        else:
            continue
        inner = PurePosixPath(os.path.relpath(path, "/"))
        yield from dict.fromkeys(root / part for part in (inner, *inner.parents))


def _read(file: Path) -> str:
    """A file's text, empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
