"""What light commands cost: CPU seconds against `trl grpo --help`, and no heavy library loaded.

`python -m benchmarks.startup [--pairs N]`; exits 1 when a bound is not met.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from benchmarks.measuring import ROOT, Bounds, Row, options, run, script, show

NAMES = Bounds(ratio=0.05, ours=0.15)
"""Of help that needs no option of a run."""
LIGHT = Bounds(ratio=0.1, ours=0.25)
CHILD = Bounds(ratio=2.0)
"""Of commands whose child process loads the environment, torch and TRL, as the run does."""
HEAVY = ("torch", "transformers", "trl", "datasets", "peft", "accelerate", "vllm")

LOADED = f"""
import sys
from aitrain.cli.main import main
try:
    main()
except SystemExit:
    pass
print("\\nloaded:", *(name for name in {HEAVY} if name in sys.modules))
"""


@dataclass(frozen=True)
class Command:
    """One thing to ask of `aitrain`, the exit code that it must answer with, and what it may cost."""

    name: str
    words: tuple[str, ...]
    exit_code: int | None = 0
    """None: any, for `doctor`, which judges the machine."""
    bounds: Bounds = LIGHT
    variables: tuple[str, ...] = ()
    """Environment variables, as `env` takes them."""


RUN = ("--model", "tiny", "--rl-env", "envs.arithmetic")
COMMANDS = (
    Command("aitrain --help", ("--help",), bounds=NAMES),
    Command("aitrain --version", ("--version",), bounds=NAMES),
    Command("aitrain view --help", ("view", "--help"), bounds=NAMES),
    Command("aitrain env --help", ("env", "--help"), bounds=NAMES),
    Command("aitrain grpo --help", ("grpo", "--help")),
    Command("refused: unknown flag", ("grpo", "--no-such-flag", "1"), 2),
    Command("refused: no such environment", ("grpo", "--model", "tiny", "--rl-env", "no_such_file.py:Task"), 2),
    Command("refused: no such run", ("show", "no-such-run"), 2),
    Command("grpo --dry-run --options-only", ("grpo", *RUN, "--dry-run", "--options-only")),
    Command("plan --options-only", ("plan", *RUN, "--options-only")),
    Command("grpo --dry-run", ("grpo", *RUN, "--dry-run"), bounds=CHILD),
    Command("plan", ("plan", *RUN), bounds=CHILD),
    Command("runs", ("runs",)),
    Command("doctor", ("doctor",), None),
    Command(
        "completion of a command", (), bounds=NAMES,
        variables=("_AITRAIN_COMPLETE=complete_bash", "COMP_WORDS=aitrain gr", "COMP_CWORD=1"),
    ),
    Command(
        "completion of an option", (),
        variables=("_AITRAIN_COMPLETE=complete_zsh", "_TYPER_COMPLETE_ARGS=aitrain grpo --"),
    ),
    Command(
        "completion of a value", (),
        variables=("_AITRAIN_COMPLETE=complete_bash", "COMP_WORDS=aitrain grpo --vllm-mode co", "COMP_CWORD=3"),
    ),
)  # fmt: skip


def main() -> int:
    """Measure, show, judge."""
    pairs = options("CPU seconds of light commands, against `trl grpo --help`.").parse_args().pairs
    measure_round()  # the first one reads from disk, and writes byte code
    rounds = [measure_round() for _ in range(pairs)]
    theirs = [costs[-1] for costs in rounds]
    rows = [
        Row(command.name, [costs[number] for costs in rounds], theirs, command.bounds)
        for number, command in enumerate(COMMANDS)
    ]
    print(f"CPU seconds (user + system), {pairs} rounds of every command in turn\n")
    is_met = show(rows, "trl grpo --help")
    return 0 if is_light() and is_met else 1


def measure_round() -> list[float]:
    """CPU seconds of each of our commands, one after the other, and last of TRL's."""
    ours = [
        run(["env", *command.variables, script("aitrain"), *command.words], command.exit_code).cpu_seconds
        for command in COMMANDS
    ]
    return [*ours, run([script("trl"), "grpo", "--help"]).cpu_seconds]


def is_light() -> bool:
    """Whether no command loads a heavy library; those that do are named."""
    loaded = {command.name: heavy for command in COMMANDS if (heavy := heavy_libraries(command))}
    print(f"\nlibraries loaded, of {', '.join(HEAVY)}: ", end="")
    print("; ".join(f"{name} loads {heavy}: NOT MET" for name, heavy in loaded.items()) or "none: ok")
    return not loaded


def heavy_libraries(command: Command) -> str:
    """Those that are loaded after the command was run in a process of its own; empty when none is."""
    child = ["env", *command.variables, sys.executable, "-c", LOADED, *command.words]
    said = subprocess.run(child, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return said.splitlines()[-1].removeprefix("loaded:").strip()


if __name__ == "__main__":
    sys.exit(main())
