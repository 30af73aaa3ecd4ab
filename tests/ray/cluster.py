"""Ray on machines that are namespaces; Ray starts slowly on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.machines.namespaces import ADDRESSES, NamespaceMachine, Network

RAY = str(Path(sys.executable).parent / "ray")
SECONDS = 900.0
"""How long a test waits for what must happen."""


def variables(home: Path) -> dict[str, str]:
    """Those of all processes of Ray, and of the commands that use it."""
    quick = {"period_ms": 1000, "initial_delay_ms": 1000, "timeout_ms": 2000, "failure_threshold": 3}
    return {
        "HOME": str(home),
        "TMPDIR": tempfile.gettempdir(),  # Ray's folder is below it
        "PATH": f"{Path(RAY).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray's is 15, by which other programs of this machine go first
        "RAY_enable_metrics_collection": "0",
        **{f"RAY_health_check_{name}": str(value) for name, value in quick.items()},
    }


def add_machine(network: Network) -> NamespaceMachine:
    """Switch on one more machine with Ray and one CPU; the first one is the head of the cluster."""
    machine = network.add()
    own = machine.folder / f"ray-{machine.name}"  # Ray's folder is another one on each machine
    own.mkdir()
    default = Path(tempfile.gettempdir(), "ray")
    default.mkdir(exist_ok=True)
    machine.run("mount", "--bind", str(own), str(default))
    is_head = machine is network.machines[0]
    place = ["--head", "--port=6379", "--include-dashboard=false"] if is_head else ["--address=10.77.0.1:6379"]
    command = [
        RAY, "start", *place, f"--node-ip-address={ADDRESSES[machine.name]}", "--num-cpus=1",
        "--object-store-memory=80000000", "--disable-usage-stats",
    ]  # fmt: skip
    given = variables(machine.folder)
    for _ in range(3):  # Ray gives up after 30 seconds, which a busy machine needs
        with suppress(subprocess.CalledProcessError):
            machine.run(*command, **given)
            return machine
        machine.run(RAY, "stop", "--force", **given)
    raise AssertionError("Ray does not start")
