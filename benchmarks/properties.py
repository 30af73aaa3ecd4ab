"""Thousands of examples of what tests/properties.py says must hold: `python -m benchmarks.properties [--examples N]`.

Prints how many were tried and what was wrong with the first that failed; exits 1 then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import properties

PROPERTIES: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "mappings as --config": (properties.holds_for_a_file_of_options, (properties.mappings,)),
    "likely mappings as --config": (properties.holds_for_a_file_of_options, (properties.likely_mappings,)),
    "texts as --config": (properties.holds_for_a_file, (st.text(),)),
    "texts behind flags": (properties.holds_for_a_flag, (st.sampled_from(properties.OPTIONS), properties.flag_values)),
    "JSON as --rl-env-config": (
        properties.holds_for_an_environments_config,
        (properties.json_values, st.booleans()),
    ),
}


def main() -> int:
    """Try them all."""
    parser = argparse.ArgumentParser(description="Anything in files and behind flags: never a traceback.")
    parser.add_argument("--examples", type=int, default=5000, help="of each property (default: 5000)")
    wanted = parser.parse_args()
    total = 0
    with properties.built_once():
        for name, (holds, strategies) in PROPERTIES.items():
            start = time.monotonic()
            tried = attempt(holds, strategies, wanted.examples)
            total += tried
            print(f"{name:30} {tried:7} examples hold, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{'all':30} {total:7} examples hold")
    return 0


def attempt(holds: Callable[..., None], strategies: tuple[Any, ...], examples: int) -> int:
    """How many examples were tried; hypothesis raises what is wrong with the first that fails."""
    tried = 0

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.tuples(*strategies))
    def check(example: tuple[Any, ...]) -> None:
        nonlocal tried
        tried += 1
        holds(*example)

    check()
    return tried


if __name__ == "__main__":
    sys.exit(main())
