"""What it costs to look at a large run: 100,000 episodes, a gigabyte of rollouts, made up and like real ones.

`python -m benchmarks.report [--pairs N] [--keep FOLDER]`; exits 1 when a bound is not met. There is no peer: bounds are
absolute, in seconds of waiting and MiB of memory. Seconds of CPU stand beside, as waiting depends on who else computes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measuring import options, run, script, spread

EPISODES = 100_000
BYTES = 10**9
GROUP, GROUPS = 8, 16
HELD_OUT = 64
RUNS = 300
"""Runs in the table."""
NEEDLE = "Xylophonist"
"""A word that one episode has, near the end."""
WRITE = """
import sys
from pathlib import Path
from aitrain.ui.report_writer import ReportWriter
from aitrain.runs.run_folder import RunFolder
def tell(event):
    raise SystemExit(str(event))
ReportWriter(RunFolder(Path(sys.argv[1]))).write(tell)
"""
WORDS = [
    "the room",
    "is",
    "12",
    "nights;",
    "so",
    "\n",
    "therefore",
    '"yes"',
    "add 37",
    "Straße",
    "no, wait:",
    "4.5 %",
    "é",
]


@dataclass
class Measured:
    """One thing that was measured several times, and what it may be at most."""

    name: str
    unit: str
    most: float | None = None
    values: list[float] = field(default_factory=list)

    @property
    def is_met(self) -> bool:
        """Whether the median is within the bound."""
        return self.most is None or statistics.median(self.values) <= self.most

    def __str__(self) -> str:
        verdict = "" if self.most is None else f"at most {self.most:g}: {'ok' if self.is_met else 'NOT MET'}"
        return f"{self.name:44} {self.unit:6} {spread(self.values):28} {verdict}".rstrip()


def main() -> int:
    """Make a run, look at it, judge."""
    parser = options("What it costs to look at a run of 100,000 episodes.")
    parser.add_argument("--keep", type=Path, help="folder to make the run in, or to take it from")
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not (folder / "metrics.jsonl").exists():
            make_run(folder)
        size = sum(file.stat().st_size for file in (folder / "rollouts").iterdir())
        print(f"{EPISODES:,} episodes, {size / 1e9:.2f} GB of rollouts; median (min..max) of {given.pairs}\n")
        measured = [*measure_report(folder, given.pairs), *measure_view(folder, given.pairs)]
        measured += measure_table(folder, given.pairs)
    for one in measured:
        print(one)
    return 0 if all(one.is_met for one in measured) else 1


# -- the run


def make_run(folder: Path) -> None:
    """A run as a training would have left it, but for its model."""
    rng = random.Random(0)
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    with (folder / "rollouts" / "rank0.jsonl").open("w", encoding="utf-8") as file:
        for number in range(EPISODES):
            file.write(json.dumps(episode(number, rng), ensure_ascii=False) + "\n")
    steps = (EPISODES - 2 * HELD_OUT) // (GROUP * GROUPS)
    names = [f"metric/{number}" for number in range(40)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = dict.fromkeys(names, 0.5) | {"reward": step / steps, "entropy": 1.0, "step_time": 3.0}
            file.write(json.dumps({"step": step, "seconds": 3.0 * step} | values) + "\n")


def episode(number: int, rng: random.Random) -> dict[str, Any]:
    """Two turns of some thousand characters; the first and the last ones are held-out cases."""
    index = number - HELD_OUT
    if held_out := number < HELD_OUT or number >= EPISODES - HELD_OUT:
        place: dict[str, Any] = {"step": 0 if number < HELD_OUT else 781}
        place["eval_phase"] = "before_sampled" if number < HELD_OUT else "after_sampled"
    else:
        place = {"step": index // (GROUP * GROUPS) + 1, "group": index // GROUP % GROUPS}
    case = 5000 + number % HELD_OUT if held_out else index // GROUP % 2000
    prompt = [{"role": "user", "content": f"Case {case}: {said(rng, 600)}"}]
    answers = [said(rng, 2500), said(rng, 2500)]
    if number == EPISODES - 1000:
        answers[0] += NEEDLE
    failure = {"kind": "raised", "place": "score_episode", "message": "ValueError"} if number % 500 == 7 else None
    return place | {
        "schema": 1, "weight_version": place["step"], "row_number": case, "row": {"kind": "made up"},
        "case_idx": case, "seed": 1, "prompt": prompt, "tools": [],
        "messages": [*prompt, {"role": "assistant", "content": answers[0]}, {"role": "user", "content": "And then?"},
                     {"role": "assistant", "content": answers[1]}],
        "completion": answers[1], "score": None if failure else rng.random(), "metrics": {"found": 1.0},
        "stop": "env_error" if failure else "done", "error": failure,
        "turns": [{"tokens": 600, "weight_version": place["step"]}] * 2, "tokens": 1200, "seconds": 0.01,
        "advantage": 0.1,
    }  # fmt: skip


def said(rng: random.Random, characters: int) -> str:
    """So many characters of words, in no order."""
    start = rng.randrange(1000)
    return TEXT[start : start + characters] + str(start)


TEXT = " ".join(random.Random(1).choices(WORDS, k=2000))


# -- the measures


def measure_report(folder: Path, times: int) -> list[Measured]:
    """A process that writes report.html: waiting, CPU, memory, and what the file weighs."""
    waited, cpu = Measured("report.html: waiting", "s", 20), Measured("report.html: CPU", "s")
    memory, size = Measured("report.html: memory", "MiB", 300), Measured("report.html: size of the file", "MB", 10)
    for _ in range(times):
        start = time.monotonic()
        used = run([sys.executable, "-c", WRITE, str(folder)])
        waited.values.append(time.monotonic() - start)
        cpu.values.append(used.cpu_seconds)
        memory.values.append(used.peak_mib)
        size.values.append((folder / "report.html").stat().st_size / 1e6)
    return [waited, cpu, memory, size]


def measure_view(folder: Path, times: int) -> list[Measured]:
    """A server for each round, started anew: the first page with curves, the rollouts read, a search over all."""
    starts, memory = Measured("view: start of the command", "s"), Measured("view: memory", "MiB", 300)
    page, all_read = Watched("view: first page", 1), Watched("view: all rollouts read")
    searches = {NEEDLE: Watched("view: search for a rare word", 5), "no such": Watched("view: search for none", 5)}
    for _ in range(times):
        start = time.monotonic()
        with serving(folder) as (address, process):
            starts.values.append(time.monotonic() - start)
            with page.watch(process.pid):
                opened(address)
            with all_read.watch(process.pid):
                while not ask(address, "run", run=folder.name)["is_ready"]:
                    time.sleep(0.1)
            for word, watched in searches.items():
                with watched.watch(process.pid):
                    answer = ask(address, "episodes", run=folder.name, text=word)
                assert (answer["total"], answer["is_complete"]) == (int(word == NEEDLE), True), answer
            memory.values.append(peak_of(process.pid))
    watched = [page, all_read, *searches.values()]
    return [starts, *(measured for one in watched for measured in (one.waiting, one.cpu)), memory]


def measure_table(folder: Path, times: int) -> list[Measured]:
    """The table of RUNS runs with the metrics of this one: the first answer of a server, and the next one."""
    first, again = Measured(f"view: table of {RUNS} runs", "s", 3), Measured("view: the same table again", "s", 0.5)
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        for number in range(RUNS):
            run = Path(place) / f"run-{number}"
            run.mkdir()
            os.link(folder / "metrics.jsonl", run / "metrics.jsonl")
            (run / "config.yaml").write_text("model: Qwen/Qwen3-0.6B\nrl_env: envs.gsm8k\n")
        for _ in range(times):
            with serving(Path(place)) as (address, _):
                for measured in (first, again):
                    start = time.monotonic()
                    assert len(ask(address, "runs")) == RUNS
                    measured.values.append(time.monotonic() - start)
    return [first, again]


class Watched:
    """How long something takes, and how much CPU a process uses meanwhile."""

    def __init__(self, name: str, most: float | None = None) -> None:
        self.waiting, self.cpu = Measured(f"{name}: waiting", "s", most), Measured(f"{name}: CPU", "s")

    @contextlib.contextmanager
    def watch(self, pid: int) -> Iterator[None]:
        """Measure while this lasts."""
        start, cpu = time.monotonic(), cpu_of(pid)
        yield
        self.waiting.values.append(time.monotonic() - start)
        self.cpu.values.append(cpu_of(pid) - cpu)


def opened(address: str) -> None:
    """What a browser asks for until it shows the curves and the newest rollouts that are read."""
    page = urllib.request.urlopen(address).read().decode()
    for part in re.findall(r'(?:src|href)="(/[^"]+)"', page):
        urllib.request.urlopen(address + part.lstrip("/")).read()
    (only,) = ask(address, "runs")
    shown = ask(address, "run", run=only["id"])
    assert len(shown["curves"]["series"]["reward"]) > 500
    ask(address, "episodes", run=only["id"])


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`aitrain view` of the run."""
    command: Sequence[str] = [script("aitrain"), "view", str(folder), "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0]
            urllib.request.install_opener(urllib.request.build_opener(urllib.request.HTTPCookieProcessor()))
            urllib.request.urlopen(address)  # the key in it becomes a cookie
            yield address.partition("?")[0], process
        finally:
            process.terminate()


def ask(address: str, what: str, **parameters: str) -> Any:
    """One of the server's answers."""
    return json.load(urllib.request.urlopen(f"{address}api/{what}?{urllib.parse.urlencode(parameters)}"))


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a living process has used."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def peak_of(pid: int) -> float:
    """The most memory that a living process has had, MiB (Linux)."""
    return int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
