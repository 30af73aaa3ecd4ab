"""What it costs to look at a large run: 100,000 episodes, a gigabyte of rollouts, made up and like real ones.

There is no peer: bounds are absolute, in seconds of waiting and MiB of memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.measuring import Asked, Figure, run, script

EPISODES = 100_000
GROUP, GROUPS = 8, 16
HELD_OUT = 64
NEEDLE = "Xylophonist"
"""A word that one episode has, near the end."""
WRITE = """
import sys
from pathlib import Path
from aitrain.ui.page import write_report
from aitrain.runs.run_folder import RunFolder
def tell(event):
    raise SystemExit(str(event))
write_report(RunFolder(Path(sys.argv[1])), tell)
"""
WORDS = ["the room", "12", "nights;", "\n", '"yes"', "Straße", "é"]


MOST = {
    "report.html: seconds": 20, "report.html: memory, MiB": 300, "report.html: size of the file, MB": 10,
    "view, first page: seconds": 1, "view, search for a rare word: seconds": 5, "view, search for none: seconds": 5,
    "view: memory, MiB": 300,
}  # fmt: skip
"""The bounds of some measures."""

Values = defaultdict[str, list[float]]
"""What was measured several times, by its name."""


def measure(asked: Asked) -> Iterator[Figure]:
    """Make a run, and look at it."""
    values: Values = defaultdict(list)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        make_run(folder, 2_000 if asked.is_short else EPISODES)
        for _ in range(asked.pairs):
            write_report(folder, values)
            open_view(folder, values)
    for name, measured in values.items():
        yield Figure(name, measured, MOST.get(name, math.inf))


# -- the run


def make_run(folder: Path, episodes: int) -> None:
    """A run as a training would have left it, but for its model."""
    rng = random.Random(0)
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    with (folder / "rollouts" / "rank0.jsonl").open("w", encoding="utf-8") as file:
        for number in range(episodes):
            file.write(json.dumps(episode(number, episodes, rng), ensure_ascii=False) + "\n")
    steps = (episodes - 2 * HELD_OUT) // (GROUP * GROUPS)
    names = [f"metric/{number}" for number in range(40)]
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = dict.fromkeys(names, 0.5) | {"reward": step / steps, "entropy": 1.0, "step_time": 3.0}
            file.write(json.dumps({"step": step, "seconds": 3.0 * step} | values) + "\n")


def episode(number: int, episodes: int, rng: random.Random) -> dict[str, Any]:
    """Two turns of some thousand characters; the first and the last ones are held-out cases."""
    index = number - HELD_OUT
    if held_out := number < HELD_OUT or number >= episodes - HELD_OUT:
        place: dict[str, Any] = {"step": 0 if number < HELD_OUT else episodes // (GROUP * GROUPS)}
        place["eval_phase"] = "before_sampled" if number < HELD_OUT else "after_sampled"
    else:
        place = {"step": index // (GROUP * GROUPS) + 1, "group": index // GROUP % GROUPS}
    case = 5000 + number % HELD_OUT if held_out else index // GROUP % 2000
    prompt = [{"role": "user", "content": f"Case {case}: {said(rng, 600)}"}]
    answers = [said(rng, 2500), said(rng, 2500)]
    if number == episodes - 1000:
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


def write_report(folder: Path, values: Values) -> None:
    """A process that writes report.html: waiting, memory, and what the file weighs."""
    with watched("report.html", values):
        used = run([sys.executable, "-c", WRITE, str(folder)])
    values["report.html: memory, MiB"].append(used.peak_mib)
    values["report.html: size of the file, MB"].append((folder / "report.html").stat().st_size / 1e6)


def open_view(folder: Path, values: Values) -> None:
    """A server: the first page with curves, the rollouts read, a search over all."""
    with serving(folder) as (client, process):
        with watched("view, first page", values):
            open_page(client)
        with watched("view, all rollouts read", values):
            while not ask(client, "run", run=folder.name)["is_ready"]:
                time.sleep(0.1)
        for name, word, expected in (("a rare word", NEEDLE, 1), ("none", "no such", 0)):
            with watched(f"view, search for {name}", values):
                answer = ask(client, "episodes", run=folder.name, text=word)
            assert answer["total"] == expected, answer
        status = Path(f"/proc/{process.pid}/status").read_text()
        values["view: memory, MiB"].append(int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024)


@contextlib.contextmanager
def watched(name: str, values: Values) -> Iterator[None]:
    """How long this lasts."""
    start = time.monotonic()
    yield
    values[f"{name}: seconds"].append(time.monotonic() - start)


def open_page(client: httpx.Client) -> None:
    """What a browser asks for until it shows the curves and the newest rollouts that are read."""
    for part in re.findall(r'(?:src|href)="(/[^"]+)"', client.get("").raise_for_status().text):
        client.get(part).raise_for_status()
    (only,) = ask(client, "runs")
    assert ask(client, "run", run=only["id"])["curves"]["series"]["reward"]
    ask(client, "episodes", run=only["id"])


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """`aitrain view` of the run."""
    command = [script("aitrain"), "view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address, _, key = process.stdout.readline().split()[0].partition("?")
            with httpx.Client(base_url=address, follow_redirects=True, timeout=60) as client:
                client.get(f"?{key}").raise_for_status()  # which becomes a cookie
                yield client, process
        finally:
            process.terminate()


def ask(client: httpx.Client, what: str, **parameters: str) -> Any:
    """One of the server's answers."""
    return client.get(f"api/{what}", params=parameters).raise_for_status().json()
