"""What light commands cost: CPU seconds, also by those of `trl grpo --help`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.measuring import Asked, Figure, ratio, run, script

NAMES = (0.05, 0.15)
"""Of help that needs no option of a run: the most by TRL's, and the most CPU seconds."""
LIGHT = (0.1, 0.3)
CHILD = (2.0, math.inf)
"""Of commands whose child process loads the environment, torch and TRL, as the run does."""


@dataclass(frozen=True)
class Command:
    """One thing to ask of `aitrain`, the exit code that it must answer with, and what it may cost."""

    name: str
    words: tuple[str, ...]
    exit_code: int | None = 0
    """None: any, for `doctor`, which judges the machine."""
    most: tuple[float, float] = LIGHT
    variables: tuple[str, ...] = ()
    """Environment variables, as `env` takes them."""


RUN = ("--model", "tiny", "--rl-env", "envs.arithmetic")
COMMANDS = (
    Command("aitrain --help", ("--help",), most=NAMES),
    Command("aitrain env --help", ("env", "--help")),
    Command("aitrain grpo --help", ("grpo", "--help")),
    Command("refused: no such environment", ("grpo", "--model", "tiny", "--rl-env", "no_such_file.py:Task"), 2),
    Command("plan", ("plan", *RUN)),
    Command("plan", ("plan", *RUN), most=CHILD),
    Command("doctor", ("doctor",), None),
    Command(
        "completion of a value", (),
        variables=("_AITRAIN_COMPLETE=complete_bash", "COMP_WORDS=aitrain grpo --vllm-mode co", "COMP_CWORD=3"),
    ),
)  # fmt: skip


def measure(asked: Asked) -> Iterator[Figure]:
    """Measure each command and TRL's in turn."""
    commands = [command for command in COMMANDS if not asked.is_short or command.most == LIGHT]
    if not asked.is_short:
        measure_round(commands)  # the first one reads from disk, and writes byte code
    rounds = [measure_round(commands) for _ in range(asked.pairs)]
    theirs = [costs[-1] for costs in rounds]
    for number, command in enumerate(commands):
        ours = [costs[number] for costs in rounds]
        most, most_seconds = command.most
        yield ratio(f"{command.name}: CPU, by trl grpo --help", ours, theirs, most)
        if most_seconds < math.inf:
            yield Figure(f"{command.name}: CPU seconds", ours, most_seconds)


def measure_round(commands: list[Command]) -> list[float]:
    """CPU seconds of each of our commands, one after the other, and last of TRL's."""
    ours = [
        run(["env", *command.variables, script("aitrain"), *command.words], command.exit_code).cpu_seconds
        for command in commands
    ]
    return [*ours, run([script("trl"), "grpo", "--help"]).cpu_seconds]
