"""Simulates fleets of training processes, servers and environments, and shows what saturates first.

`python -m benchmarks.fleet` checks the simulation against trainings on this machine, and exits 1 when a bound is not
met: two runs of one process calibrate it; it predicts a run with fewer workers of the environment, and one with two
processes.

`python -m benchmarks.fleet RUN` reads a run's rollouts and metrics instead, and shows a step of it on other fleets:
`--processes 1,2,4`, `--servers 1,2,4` (if it had a vLLM server), `--workers 64,256`, `--groups 8,64` for other batches.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.fleet_simulation import Fleet, parts_of, saturation, simulate_step, simulate_steps
from benchmarks.measured_run import MeasuredRun, calibrate, calibrate_servers
from benchmarks.measuring import ROOT, options, positive, run, script
from benchmarks.overhead import SURROUNDINGS

OFF = 0.25
"""How far a simulated rollout may be from the measured one."""
DRAWN = 128
"""Groups that are drawn for a fleet, in one step or several: the mean of few groups would depend on which."""
GENERATIONS = 4
SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "rl_env": f"{ROOT / 'benchmarks' / 'waiting.py'}:Waiting",
    "rl_num_generations": GENERATIONS,
    "rl_max_new_tokens": 16,
    "eval_cases": 0,
    "eval_strategy": "no",
    "save_strategy": "no",
}


@dataclass(frozen=True)
class Setup:
    """A training of the check: its prompts per step, processes, and workers of the environment for each of them."""

    prompts: int
    processes: int = 1
    workers: int = 64

    def __str__(self) -> str:
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return f"{self.prompts * GENERATIONS} episodes, {processes}, {self.workers} workers"

    @property
    def settings(self) -> dict[str, Any]:
        """Its options."""
        episodes = self.prompts * GENERATIONS // self.processes
        sizes = {"rl_prompts_per_step": self.prompts, "batch_size": episodes}
        return {**SETTINGS, **sizes, "num_processes": self.processes, "rl_env_workers": self.workers}

    def on(self, fleet: Fleet) -> Fleet:
        """The calibrated fleet with these numbers."""
        return replace(fleet, processes=self.processes, env_workers=self.workers)


CALIBRATION = Setup(prompts=4), Setup(prompts=8)
PREDICTED = Setup(prompts=8, workers=4), Setup(prompts=8, processes=2, workers=4)


def main() -> int:
    """Check the simulation, or show a run on other fleets."""
    wanted = _options()
    if wanted.run is not None:
        return show_run(wanted)
    os.environ.update(SURROUNDINGS)
    with tempfile.TemporaryDirectory(prefix="aitrain-fleet-") as folder:
        measured = {setup: trained(Path(folder), setup, wanted.steps) for setup in (*CALIBRATION, *PREDICTED)}
    fleet = calibrate([measured[setup] for setup in CALIBRATION], Fleet())
    return (
        0 if show_check(fleet, measured[CALIBRATION[1]], {str(one): (one, measured[one]) for one in PREDICTED}) else 1
    )


def _options() -> argparse.Namespace:
    parser = options("What saturates first: simulated fleets, checked against measured runs.")
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help="folder of a run; without it, the check")
    parser.add_argument("--steps", type=positive, default=8, help="timed steps of each training of the check")
    for name, text in {
        "processes": "training processes", "servers": "vLLM servers", "workers": "calls of the environment at a time",
        "groups": "groups in a step",
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=numbers, default=None, metavar="N,N", help=f"numbers of {text}")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    """`1,2,4`, for argparse."""
    return [positive(one) for one in text.split(",")]


# -- the check


def trained(folder: Path, setup: Setup, steps: int) -> MeasuredRun:
    """Train, and read what was measured."""
    config = write_config(folder, f"{setup.prompts}-{setup.processes}-{setup.workers}", setup.settings, steps)
    run([script("aitrain"), "grpo", "--config", str(config), "--quiet"])
    return MeasuredRun.read(folder / config.stem)


def write_config(folder: Path, name: str, settings: Mapping[str, Any], steps: int) -> Path:
    """The options of a run of this name, with one step before those that are timed."""
    config = folder / f"{name}.yaml"
    named = {"project_name": name, "output_dir": str(folder), "max_steps": steps + 1, "logging_steps": 1}
    config.write_text(json.dumps({**settings, **named}), encoding="utf-8")
    return config


def show_check(fleet: Fleet, workload: MeasuredRun, runs: Mapping[str, tuple[Setup, MeasuredRun]]) -> bool:
    """Print simulated beside measured medians; returns whether all rollouts are within the bound.

    The simulated steps have the episodes of `workload`, whose cases and seeds the other runs had as well. A run
    measures the rollout of its process 0. Whole steps have no bound: the time of training depends on what else the
    machine does.
    """
    print(f"{'seconds, median of the steps':44} {'simulated':>10} {'measured':>10}  simulated / measured")
    worst = 0.0
    for name, (setup, measured) in runs.items():
        step = median(simulate_step(setup.on(fleet), episodes).seconds for episodes in workload.steps)
        alone = replace(setup.on(fleet), processes=1)
        own = [parts_of(episodes, setup.processes)[0] for episodes in workload.steps]
        rollout = median(simulate_step(alone, episodes).rollout for episodes in own)
        worst = max(worst, abs(rollout / median(measured.rollouts) - 1))
        for part, ours, theirs in (
            ("rollout", rollout, median(measured.rollouts)),
            ("step", step, median(measured.each("time/step"))),
        ):
            print(f"{name + ': ' + part:44} {ours:10.3f} {theirs:10.3f}  {ours / theirs:.2f}")
    print(f"\nworst rollout: {worst:.0%} off, bound: {OFF:.0%}")
    return worst <= OFF


# -- a run on other fleets


def show_run(wanted: argparse.Namespace) -> int:
    """Print a step of the run on each of the fleets."""
    try:
        measured = MeasuredRun.read(wanted.run)
        fleet, groups = fleet_of(wanted.run, measured)
    except (OSError, ValueError) as why:
        print(f"{wanted.run} cannot be simulated: {why}", file=sys.stderr)
        return 2
    print(f"measured: {measured.mean('time/step'):.2f} s a step, {measured.rollout_seconds:.2f} s of it the rollout\n")
    print(f"{'processes':>9} {'servers':>7} {'workers':>7} {'groups':>6} {'sync':>7} {'rollout':>8} {'train':>7} "
          f"{'step':>8}  {'servers':>7} {'workers':>7} {'trainers':>8}  most useful")  # fmt: skip
    for other, many in fleets(fleet, groups, wanted):
        steps = [measured.draw(many, seed) for seed in range(max(1, DRAWN // many))]
        step = simulate_steps(other, steps)
        name, gain = next(iter(saturation(other, steps).items()))
        print(
            f"{other.processes:9} {other.servers or '-':>7} {other.env_workers:7} {many:6} {step.sync:7.2f} "
            f"{step.rollout:8.2f} {step.train:7.2f} {step.seconds:8.2f}  {step.server_use:7.0%} {step.worker_use:7.0%} "
            f"{step.trainer_use:8.0%}  {name}: {gain:.2f} times faster"
        )
    return 0


def fleet_of(folder: Path, measured: MeasuredRun) -> tuple[Fleet, int]:
    """The fleet that the run had, calibrated, and its groups in a step."""
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    is_served = str(config.get("rl_env")).startswith(("http://", "https://"))
    usual = 4 * (os.cpu_count() or 1) if config.get("rl_env_isolation") == "process" else 256 if is_served else 64
    workers = int(str(config.get("rl_env_workers") or usual).rpartition(":")[2])  # `ray:64` is possible
    fleet = Fleet(processes=measured.processes, env_workers=workers)
    groups = max(1, len(measured.groups) // len({step for step, _ in measured.groups}))
    if not (config.get("use_vllm") and config.get("vllm_mode") == "server"):
        return calibrate([measured], fleet), groups
    urls = (config.get("vllm_server_url") or "").split(",")
    fleet = replace(fleet, servers=config.get("vllm_servers") or len(urls), sync_bytes=measured.mean("sync/bytes"))
    if (seconds := measured.mean("sync/seconds")) > 0:
        fleet = replace(fleet, write_speed=fleet.sync_bytes / seconds)
    return calibrate_servers(measured, fleet), groups


def fleets(fleet: Fleet, groups: int, wanted: argparse.Namespace) -> Iterator[tuple[Fleet, int]]:
    """Each combination of the numbers that were asked for, beginning with those of the run."""

    def tried(given: Sequence[int] | None, measured: int) -> list[int]:
        return [measured, *(number for number in given or () if number != measured)]

    servers = [None] if fleet.servers is None else tried(wanted.servers, fleet.servers)
    for processes, number, workers, many in product(
        tried(wanted.processes, fleet.processes), servers, tried(wanted.workers, fleet.env_workers),
        tried(wanted.groups, groups),
    ):  # fmt: skip
        yield replace(fleet, processes=processes, servers=number, env_workers=workers), many


if __name__ == "__main__":
    sys.exit(main())
