"""A training in one process, in two, and on two machines: seconds of a rollout and a step, bytes on the wire, and what
the connections between the machines cost.

`python -m benchmarks.scale [--steps N]`; exits 1 when a bound is not met. The two machines are namespaces of this one
(`tests/machines/namespaces.py`), which needs root; without it that part is left out. The times are compared with those
that `benchmarks/fleet.py` simulates. For the connections, one process plays the commands of 63 other machines.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from aitrain.runs.metrics_line import read_metrics
from benchmarks.fleet import CALIBRATION, Setup, show_check, trained, write_config
from benchmarks.fleet_simulation import Fleet
from benchmarks.measured_run import MeasuredRun, calibrate
from benchmarks.measuring import options, positive
from benchmarks.overhead import SURROUNDINGS
from tests.machines.namespaces import ADDRESSES, NamespaceMachine, Pair, cannot_make_machines, two_machines

LOCAL = Setup(prompts=8, workers=4), Setup(prompts=8, processes=2, workers=4)
NODES = 64
LINK_SECONDS = 10.0
"""Seconds for which the connections are measured."""
STEP_SECONDS = 1.0
"""A step of that many seconds is short for a training on 64 machines."""
EVENT: dict[str, Any] = {"step": 100, "values": {f"metric/{number}": 0.123456789 for number in range(20)}}
"""What each machine tells node 0 in a step, about 700 bytes."""
OVERHEAD = 0.005
"""Bound: CPU seconds of node 0's connections in a step."""


def main() -> int:
    """Measure, show, judge."""
    parser = options("Seconds and bytes of a step by processes and machines, and the cost of their connections.")
    parser.add_argument("--steps", type=positive, default=8, help="timed steps of each training (default: 8)")
    wanted = parser.parse_args()
    os.environ.update(SURROUNDINGS)
    with tempfile.TemporaryDirectory(prefix="aitrain-scale-") as folder:
        measured = {setup: trained(Path(folder), setup, wanted.steps) for setup in (*CALIBRATION, *LOCAL)}
        runs = {str(setup): (setup, measured[setup]) for setup in LOCAL}
        if why := cannot_make_machines():
            print(f"two machines were left out: {why}\n")
        else:
            with two_machines(Path(folder), NamespaceMachine("nodeA"), NamespaceMachine("nodeB")) as pair:
                run, per_step = trained_on(pair, wanted.steps)
            runs["two machines"] = (LOCAL[1], run)
            print(f"{per_step / 2**20:.2f} MiB a step between two machines, both directions\n")
    fleet = calibrate([measured[setup] for setup in CALIBRATION], Fleet())
    is_met = show_check(fleet, measured[CALIBRATION[1]], runs)
    cost = link_cost(NODES)
    print(f"\nnode 0 of {NODES} machines: {1000 * cost:.2f} CPU ms in a step of {STEP_SECONDS:g} s for heartbeats and "
          f"events of all of them, bound: {1000 * OVERHEAD:g}: {'ok' if cost <= OVERHEAD else 'NOT MET'}")  # fmt: skip
    return 0 if is_met and cost <= OVERHEAD else 1


# -- two machines


def trained_on(pair: Pair, steps: int) -> tuple[MeasuredRun, float]:
    """Train on both with a process each; what was measured, and the bytes of a step on the wire."""
    config = write_config(pair.folder, "machines", {**LOCAL[1].settings, "num_processes": 1}, steps)
    place = ["--nnodes=2", f"--master-addr={ADDRESSES['nodeA']}"]
    flags = ["grpo", "--config", str(config), "--quiet", *place]
    with watched_bytes(pair.machines[0], pair.folder / "machines" / "metrics.jsonl") as moved:
        commands = [pair.start(node, *flags, f"--node-rank={node}", **SURROUNDINGS).process for node in range(2)]
        said = [command.communicate()[1] for command in commands]
    if any(command.returncode for command in commands) or len(moved) < 2:
        raise RuntimeError("the training on two machines failed, or its steps were not seen:\n" + "\n".join(said))
    first, last = min(moved), max(moved)
    return MeasuredRun.read(pair.folder / "machines"), (moved[last] - moved[first]) / (last - first)


@contextmanager
def watched_bytes(machine: NamespaceMachine, metrics: Path) -> Iterator[dict[int, int]]:
    """Bytes that were moved until each step was logged."""
    moved: dict[int, int] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.05):
            steps = [line.step for line in read_metrics(metrics)] if metrics.exists() else []
            if steps and steps[-1] not in moved:
                moved[steps[-1]] = bytes_moved(machine)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield moved
    finally:
        is_over.set()
        thread.join()


def bytes_moved(machine: NamespaceMachine) -> int:
    """Bytes over the cable since it was laid, in both directions."""
    command = machine.inside("ip", "-s", "-j", "link", "show", "dev", "cable")
    counted = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]["stats64"]
    return int(counted["rx"]["bytes"] + counted["tx"]["bytes"])


# -- connections


def link_cost(nodes: int) -> float:
    """CPU seconds that node 0's connections take in a step: heartbeats of all machines, and one event of each."""
    from aitrain.launch.node_link import NodeLink, Peer

    received = [0]

    def count(peer: Any, message: Any) -> None:
        received[0] += message.get("kind") == "event"

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with socket.create_server(("127.0.0.1", 0), backlog=nodes) as server:
        child = context.Process(target=play_nodes, args=(server.getsockname(), nodes - 1, theirs), daemon=True)
        child.start()
        try:
            link = NodeLink([Peer(server.accept()[0]) for _ in range(nodes - 1)], on_message=count)
            for number, peer in enumerate(link.peers, start=1):
                peer.node = number
            link.start()
            ours.send("begin")
            wall, cpu = time.perf_counter(), time.process_time()
            time.sleep(LINK_SECONDS)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            link.close()
        finally:
            child.terminate()
            child.join()
    expected = (nodes - 1) * (LINK_SECONDS / STEP_SECONDS - 2)
    if received[0] < expected:
        raise RuntimeError(f"node 0 got {received[0]} of {expected:.0f} events: the cost is not that of all machines")
    return cpu / wall * STEP_SECONDS


def play_nodes(address: tuple[str, int], count: int, parent: Connection) -> None:
    """The commands on all other machines, in one process: each has its connection, heartbeats and events."""
    from aitrain.launch.node_link import NodeLink, Peer

    links = [NodeLink([Peer(socket.create_connection(address))]) for _ in range(count)]
    parent.recv()
    for link in links:
        link.start()
    while True:
        start = time.monotonic()
        for link in links:
            link.tell("event", **EVENT)
        time.sleep(max(0.0, STEP_SECONDS - (time.monotonic() - start)))


if __name__ == "__main__":
    sys.exit(main())
