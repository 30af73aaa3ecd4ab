"""CPU cores, memory and open files that this process may use, within its CPU affinity and the limits of its control
groups."""

import os
import re
import warnings
from contextlib import suppress
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")

# -- cores


def usable_cores() -> int:
    """Number of cores, at least 1; a quota of 2.5 cores counts as 2."""
    cores: float = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups():
        with suppress(ValueError):  # `max 100000`: no limit
            quota, period = map(int, _read(folder / "cpu.max").split())
            cores = min(cores, quota / period)
    return max(1, int(cores))


# -- memory, in bytes


def total_memory() -> int | None:
    """Maximum memory in bytes that this process may use; None if unknown."""
    return _memory()[0]


def free_memory() -> int | None:
    """Memory in bytes that can still be allocated, within the limits of control groups; None if unknown."""
    return _memory()[1]


def _memory() -> tuple[int, int] | tuple[None, None]:
    """Total and free memory, None if unknown. Cached files of a control group are not used: the kernel drops them."""
    import psutil  # here, as most commands need none of it

    try:
        with warnings.catch_warnings(action="ignore"):  # of a kernel that leaves out figures we do not read
            memory = psutil.virtual_memory()
    except (OSError, KeyError):
        return None, None
    total, free = int(memory.total), int(memory.available)
    for folder in _groups():
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        cached = re.search(r"^inactive_file (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
        if limit.isdecimal() and used.isdecimal():
            total = min(total, int(limit))
            free = min(free, max(0, int(limit) - max(0, int(used) - int(cached[1] if cached else 0))))
    return total, free


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


def _groups() -> list[Path]:
    """Folders of this process's control groups in version 2 of the kernel's interface, innermost first.

    A group's limit holds for the groups inside it. A container may see its own group as the root.
    """
    paths = re.findall("^0::(.*)", _read(PROC / "self" / "cgroup"), re.MULTILINE)
    inner = PurePosixPath(os.path.relpath(paths[0] if paths else "/", "/"))
    return [CGROUPS / part for part in (inner, *inner.parents)]


def _read(file: Path) -> str:
    """A file's text, empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
