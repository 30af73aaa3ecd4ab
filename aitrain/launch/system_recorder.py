"""Records the CPU, memory and GPU use of a run into system.jsonl while the run lasts."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from aitrain.launch.nvidia import ask_driver
from aitrain.machine import free_memory
from aitrain.runs.run_folder import append_lines

EVERY, SHARE = 5.0, 0.005
"""Seconds between the first samples; later ones are as far apart as this share of the run so far, so that the file of a
week has 2,000 lines."""
PATIENCE = 2.0
"""Seconds that the end of a run waits for a sample that is being taken."""
GIB = 2**30

Cpu = dict[tuple[int, float], float]
"""Seconds of CPU of processes, by process id and start time."""


class SystemRecorder:
    """Samples this process and its descendants, and the GPUs, in a thread. Errors do not end the run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._record, name="system recorder", daemon=True)
        self._has_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
        self._before: tuple[float, Cpu] = 0.0, {}

    def __enter__(self) -> SystemRecorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)

    def _record(self) -> None:
        with suppress(Exception):  # a full disk, or a process that may not be read: the curves end here
            begin = time.monotonic()
            self.sample()
            while not self._over.wait(max(EVERY, SHARE * (time.monotonic() - begin))):
                append_lines(self.path, [self.sample()])

    def sample(self) -> dict[str, float]:
        """One line: `cpu_cores` since the last sample, `memory_gib` of the run's processes (pages that processes share
        count in each), `free_memory_gib` of the machine, and `gpu_use/<index>` and `gpu_memory_gib/<index>`."""
        import psutil  # here, as commands that check or start a run have no time for it

        cpu, memory = Cpu(), 0
        own = psutil.Process(os.getpid())
        for process in (own, *own.children(recursive=True)):
            with suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                cpu[process.pid, process.create_time()] = times.user + times.system
                memory += process.memory_info().rss
        now, free = time.time(), free_memory()
        then, before = self._before
        used = sum(seconds - before.get(process, 0.0) for process, seconds in cpu.items())
        self._before = now, cpu
        driver = ask_driver(only=os.environ.get("CUDA_VISIBLE_DEVICES", "")) if self._has_gpus else None
        gpus = driver.gpus if driver else ()
        self._has_gpus = bool(gpus)  # there are none, or the driver does not answer: not asked again
        values = {
            "time": round(now, 1),
            "cpu_cores": round(used / max(now - then, 1e-3), 2),
            "memory_gib": round(memory / GIB, 3),
            "free_memory_gib": None if free is None else round(free / GIB, 3),
            **{f"gpu_use/{gpu.index}": gpu.percent / 100 for gpu in gpus if gpu.percent is not None},
            **{f"gpu_memory_gib/{gpu.index}": round(gpu.used / 1024, 3) for gpu in gpus if gpu.used is not None},
        }
        return {name: value for name, value in values.items() if value is not None}
