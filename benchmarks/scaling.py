"""Rollouts of more and more episodes: the time that each of them takes, and whether memory stays.

`python -m benchmarks.scaling [--pairs N] [--rollouts N]`; exits 1 when a bound is not met. Episodes of two turns, whose
answers the tiny model really generates, with an environment that waits for a few milliseconds in between.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from aitrain.options.train import TrainConfig
from benchmarks.measuring import RSS_UNIT, Bounds, Row, options, positive, show
from benchmarks.overhead import SURROUNDINGS
from benchmarks.quiet_training import SETTINGS, quietly

SIZES = (8, 32, 128, 512)
FEW, MANY = SIZES[0], SIZES[-1]
LINEAR, FLAT = Bounds(ratio=1.0), Bounds(ratio=1.05)
WAIT = 0.005
"""Seconds of each call to the environment."""

REPEATED = 64
"""Short rollouts are repeated until they come to so many episodes, so that they are not all noise."""

Play = Callable[[int], None]


class TwoTurns:
    """Asks twice and scores digits, as slowly as a database nearby."""

    def build_dataset(self) -> list[dict[str, Any]]:
        """As many cases as the largest rollout has episodes."""
        return [{"prompt": [{"role": "user", "content": f"{number}?"}]} for number in range(MANY)]

    def episode(self) -> Generator[str | None, str, float]:
        """One episode."""
        first = yield None
        time.sleep(WAIT)
        second = yield "more?"
        time.sleep(WAIT)
        answers = first + second
        return sum(letter.isdigit() for letter in answers) / max(1, len(answers))


def main() -> int:
    """Measure, show, judge."""
    wanted = _options()
    os.environ.update(SURROUNDINGS)
    with tempfile.TemporaryDirectory(prefix="aitrain-scaling-") as folder, player(Path(folder)) as play:
        sizes = sizes_of(play, wanted.rollouts)
        rows = [*time_per_episode(play, wanted.pairs), *memory_rows(sizes, wanted.rollouts)]
    print(f"rollouts of {', '.join(map(str, SIZES))} episodes, {wanted.pairs} rounds\n")
    is_met = show(rows, "peer")
    print(f"\nthe peer of the times is a rollout of {FEW} episodes, that of memory is the first rollout of {MANY}")
    threads = ", ".join(str(size.threads) for size in sizes)
    print(f"threads before any rollout, after the first one of {MANY}, and after {wanted.rollouts} more: {threads}")
    return 0 if is_met else 1


def _options() -> argparse.Namespace:
    parser = options("Seconds and memory of rollouts, by their number of episodes.")
    parser.add_argument("--rollouts", type=positive, default=10, help="so many for the memory (default: 10)")
    return parser.parse_args()


@contextmanager
def player(folder: Path) -> Iterator[Play]:
    """`play(number)` plays so many episodes as a step of training does."""
    from aitrain.environment.runner import EnvRunner
    from aitrain.runs.run_folder import RunFolder
    from aitrain.training.preparation import prepare
    from aitrain.training.run_context import RunContext

    batch = {"batch_size": FEW, "rl_prompts_per_step": 2, "rl_num_generations": 4}
    config = TrainConfig(**SETTINGS, **batch, rl_max_new_tokens=8, eval_cases=0, output_dir=str(folder))
    with closing(EnvRunner(TwoTurns(), config)) as runner:
        with quietly():
            trainer = prepare(RunContext(config, RunFolder(folder), runner, lambda _: None)).trainer
        cases = [trainer.cases[number] for number in range(MANY)]

        def play(number: int) -> None:
            check(trainer.rollouts.play(cases[:number], range(number), range(number)), number)

        yield play


def check(episodes: list[Any], number: int) -> None:
    """Each of them has two answers and a score, or their seconds mean nothing.

    Raises:
        RuntimeError: one has not.
    """
    played = [
        episode for episode in episodes if len(episode.trajectory.turns) == 2 and episode.result.score is not None
    ]
    if len(played) != number:
        raise RuntimeError(f"{number - len(played)} of {number} episodes were not played to their end")


@dataclass(frozen=True)
class Size:
    """Of this process, in MiB, and its threads."""

    resident: float
    peak: float
    threads: int

    @classmethod
    def now(cls) -> Size:
        """Of this moment, without memory that is free."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:  # glibc hands free memory back when it likes, which is tens of MiB up and down
            trim(0)
        process = psutil.Process()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
        return cls(process.memory_info().rss / 2**20, peak / 2**20, process.num_threads())


def sizes_of(play: Play, rollouts: int) -> list[Size]:
    """Before any rollout of the largest size, after the first one, and after so many more."""
    sizes = [Size.now()]
    for count in (1, rollouts):
        for _ in range(count):
            play(MANY)
        sizes.append(Size.now())
    return sizes


def memory_rows(sizes: Sequence[Size], rollouts: int) -> list[Row]:
    """How much the process has grown since the first rollout."""
    _, first, last = sizes
    what = f"MiB after {rollouts} more of {MANY}"
    return [
        Row(f"resident {what}", [last.resident], [first.resident], FLAT),
        Row(f"peak {what}", [last.peak], [first.peak]),
    ]


def time_per_episode(play: Play, rounds: int) -> list[Row]:
    """For each size, against the smallest one; by the clock on the wall, and as CPU time of this process."""
    done = [{size: taken(play, size) for size in SIZES} for _ in range(rounds)]
    return [
        Row(
            f"{unit} per episode, {size} episodes",
            [one[size][clock] for one in done],
            [one[FEW][clock] for one in done],
            bounds,
        )
        for clock, (unit, bounds) in enumerate((("ms", LINEAR), ("CPU ms", None)))
        for size in SIZES[1:]
    ]


def taken(play: Play, size: int) -> tuple[float, float]:
    """Milliseconds for one episode of a rollout, on the wall and of the CPU; a short rollout is repeated."""
    count = max(1, REPEATED // size)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        play(size)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    return 1000 * seconds[0] / (count * size), 1000 * seconds[1] / (count * size)


if __name__ == "__main__":
    sys.exit(main())
