"""`python -m benchmarks [NAME ...] [--pairs N]`: measures what is claimed, and prints a table of figures and bounds.

A figure is the median of all pairs, with the smallest and the largest; speeds are ratios of both sides of a pair.
Exits 1 when a bound is not met, or a benchmark fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from benchmarks.measuring import HEAD, Asked, figures_of, in_new_process, table_row

NAMES = (
    "startup", "overhead", "slow_environment", "in_episode_generation", "episodes", "padding", "shared_prefix",
    "report", "intervals", "comparison", "diagnostics", "env_check", "torture",
)  # fmt: skip
SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",  # two that wait for each other measure what else the machine is doing
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}
"""The same for all sides."""


def main() -> int:
    """Measure, show, judge."""
    parser = argparse.ArgumentParser("python -m benchmarks", description="Measure what is claimed.")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=NAMES, help=f"(default: all) {', '.join(NAMES)}")
    parser.add_argument("--pairs", type=positive, help="number of pairs (default: 5)")
    parser.add_argument("--kills", type=positive, help="of torture (default: 10)")
    parser.add_argument("--processes", type=positive, default=1, help="of torture's run (default: 1)")
    parser.add_argument("--short", action="store_true", help="only to see that it works; bounds may not be met")
    given = parser.parse_args()
    pairs, kills = (1, 1) if given.short else (Asked.pairs, Asked.kills)
    asked = Asked(given.pairs or pairs, given.kills or kills, given.processes, given.short)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ.update(SURROUNDINGS)
    print(f"{HEAD}\n{'|---' * 6}|", flush=True)
    are_met = [shown(name, asked) for name in given.names or NAMES]
    return 0 if all(are_met) else 1


def shown(name: str, asked: Asked) -> bool:
    """Whether all bounds of a benchmark are met."""
    try:
        figures = in_new_process(figures_of, name, asked)
    except RuntimeError:
        print(table_row(name, "failed", "", "", "", "NO"), flush=True)
        return False
    print("\n".join(figure.row(name) for figure in figures), flush=True)
    return all(figure.is_met for figure in figures)


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    if (number := int(text)) < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
