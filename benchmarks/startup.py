"""What help and refusals cost: CPU seconds against `trl grpo --help`, and no heavy library loaded.

`python -m benchmarks.startup [--pairs N]`; exits 1 when a bound is not met.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from benchmarks.measuring import ROOT, Bounds, Row, options, run, script, show

BOUNDS = Bounds(ratio=0.1, ours=0.3)
HEAVY = ("torch", "transformers", "trl", "datasets", "peft", "accelerate", "vllm")

LOADED = f"""
import sys
from aitrain.cli.main import main
try:
    main()
except SystemExit:
    pass
print("loaded:", *(name for name in {HEAVY} if name in sys.modules))
"""


@dataclass(frozen=True)
class Command:
    """One thing to ask of `aitrain`, and the exit code that it must answer with."""

    name: str
    words: tuple[str, ...]
    exit_code: int = 0


COMMANDS = (
    Command("aitrain --help", ("--help",)),
    Command("aitrain grpo --help", ("grpo", "--help")),
    Command("refused: unknown flag", ("grpo", "--no-such-flag", "1"), 2),
    Command("refused: no such environment", ("grpo", "--model", "tiny", "--rl-env", "no_such_file.py:Task"), 2),
)


def main() -> int:
    """Measure, show, judge."""
    pairs = options("CPU seconds of help and refusals, against `trl grpo --help`.").parse_args().pairs
    measure_round()  # the first one reads from disk, and writes byte code
    rounds = [measure_round() for _ in range(pairs)]
    theirs = [costs[-1] for costs in rounds]
    rows = [
        Row(command.name, [costs[number] for costs in rounds], theirs, BOUNDS)
        for number, command in enumerate(COMMANDS)
    ]
    print(f"CPU seconds (user + system), {pairs} rounds of every command in turn\n")
    is_met = show(rows, "trl grpo --help")
    return 0 if is_light() and is_met else 1


def measure_round() -> list[float]:
    """CPU seconds of each of our commands, one after the other, and last of TRL's."""
    ours = [run([script("aitrain"), *command.words], command.exit_code).cpu_seconds for command in COMMANDS]
    return [*ours, run([script("trl"), "grpo", "--help"]).cpu_seconds]


def is_light() -> bool:
    """Whether no command loads a heavy library; those that do are named."""
    loaded = {command.name: heavy for command in COMMANDS if (heavy := heavy_libraries(command))}
    print(f"\nlibraries loaded, of {', '.join(HEAVY)}: ", end="")
    print("; ".join(f"{name} loads {heavy}: NOT MET" for name, heavy in loaded.items()) or "none: ok")
    return not loaded


def heavy_libraries(command: Command) -> str:
    """Those that are loaded after the command was run in a process of its own; empty when none is."""
    child = [sys.executable, "-c", LOADED, *command.words]
    said = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return said.splitlines()[-1].removeprefix("loaded:").strip()


if __name__ == "__main__":
    sys.exit(main())
