"""Cores and memory of a process: its affinity, and the limits of containers as the kernel shows them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from aitrain import machine
from aitrain.machine import free_memory, total_memory, usable_cores
from tests.conftest import write

MEMINFO = """\
MemTotal:       64000000 kB
MemFree:               1 kB
MemAvailable:   32000000 kB
Buffers:               1 kB
Cached:                1 kB
"""
Files = dict[str, str | bytes | None]


@pytest.fixture(autouse=True)
def eight_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path, {"proc/meminfo": MEMINFO})


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/\n", "cgroup/cpu.max": "50000 100000\n"}, 1),
        # the limit of an outer group holds for the inner ones
        ({"proc/self/cgroup": "0::/a/b\n", "cgroup/a/cpu.max": "400000 100000\n", "cgroup/a/b/cpu.max": "max 1\n"}, 4),
        # a container whose group has another name outside than inside
        ({"proc/self/cgroup": "0::/docker/4f\n", "cgroup/cpu.max": "300000 100000\n"}, 3),
    ],
    ids=range(4),
)  # fmt: skip
def test_cores_are_those_of_the_affinity_within_every_quota(tmp_path: Path, files: Files, cores: int) -> None:
    write(tmp_path, files)
    assert usable_cores() == cores


def test_a_containers_limit_counts_less_what_it_uses_and_not_what_it_caches(tmp_path: Path) -> None:
    files: Files = {
        "proc/self/cgroup": "0::/a\n",
        "cgroup/a/memory.max": "1000000\n",
        "cgroup/a/memory.current": "900000\n",
        "cgroup/a/memory.stat": "anon 5\ninactive_file 50000\n",
        "cgroup/memory.max": "max\n",
        "cgroup/memory.current": "7\n",
    }
    write(tmp_path, files)
    assert (total_memory(), free_memory()) == (1_000_000, 150_000)
