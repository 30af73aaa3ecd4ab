"""Can a program that reads only JSON repair a run that is refused? `python -m benchmarks.repair [NAME ...]`

Ten set-ups are broken in one to three places: flags, files, an environment's code. A program without a model runs
`aitrain grpo --json`, reads the last event, its message and its warnings, and applies the first rule whose form is in
it. A rule knows forms of messages, and nothing of the set-ups. A set-up is repaired if one of the first five commands
trains.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COMMANDS = 5
"""Commands that the program has."""
SMALL = "--model tiny --max-steps 1 --eval-cases 2 --rl-max-new-tokens 4 --rl-kl-coef 0"
ENV = """\
class Env:
    def __init__(self, city="Rome"):
        self.city = city

    def build_dataset(self, tokenizer):
        return [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(40)]

    def score_episode(self, completion, answer):
        return float(completion.strip() == answer)
"""
"""An environment that works."""
Run = Callable[[Sequence[str], Path], str]
"""Runs `aitrain` with arguments in a folder; returns its standard output."""


@dataclass
class Setup:
    """A command line with its files."""

    arguments: list[str]
    files: dict[str, str]

    @classmethod
    def of(cls, arguments: str, **changed: str) -> Setup:
        """A set-up with ENV as env.py, in which each key is replaced by its value."""
        return cls(shlex.split(arguments), {"env.py": _replaced(ENV, changed)})

    def rename(self, word: str, by: str) -> bool:
        """Replace a word in the command line, else in the files; returns whether it was there."""
        before = (list(self.arguments), dict(self.files))
        self.arguments = [re.sub(rf"(?<![\w./-]){re.escape(word)}(?![\w-])", by, one) for one in self.arguments]
        if before[0] == self.arguments:
            self.files = {name: re.sub(rf"\b{re.escape(word)}\b", by, text) for name, text in self.files.items()}
        return before != (self.arguments, self.files)

    def set_flag(self, flag: str, value: str) -> bool:
        """Give a flag a value; returns whether it had another one."""
        before = list(self.arguments)
        if flag in self.arguments:
            self.arguments[self.arguments.index(flag) + 1] = value
        else:
            self.arguments += [flag, value]
        return before != self.arguments

    def remove_flag(self, flag: str) -> bool:
        """Remove a flag and its value."""
        if flag not in self.arguments:
            return False
        place = self.arguments.index(flag)
        has_value = place + 1 < len(self.arguments) and not self.arguments[place + 1].startswith("--")
        del self.arguments[place : place + 1 + has_value]
        return True


def _replaced(text: str, changed: Mapping[str, str]) -> str:
    for old, new in changed.items():
        text = text.replace(old, new)
    return text


def setups() -> dict[str, Setup]:
    """The broken set-ups by what is wrong."""
    env = f"--rl-env env.py {SMALL}"
    two = Setup.of(env)
    two.files["env.py"] += "\n\n" + ENV.replace("class Env", "class Other")
    keys = Setup.of(f"--config c.yaml {env}")
    keys.files["c.yaml"] = "rl_num_generation: 4\nlearning_rate: 1e-5\n"
    colon, range_ = Setup.of(env), Setup.of(env)
    colon.files["env.py"] = ENV.replace("completion, answer):", "completion, answer)")
    range_.files["env.py"] = ENV.replace("return float(", "return 2 + 5 * float(")
    return {
        "a misspelt flag and a flag of TRL": Setup.of(f"--rl-num-generatons 4 --learning-rate 1e-5 {env}"),
        "groups that would be cut": Setup.of(f"--rl-num-generations 3 {env}"),
        "prompts that cannot be divided": Setup.of(f"--rl-prompts-per-step 3 --batch-size 5 {env}"),
        "misspelt file and class": Setup.of(f"--rl-env enf.py:Evn {SMALL}"),
        "two environments in a file": two,
        "keys of a config file": keys,
        "a misspelt argument of the environment": Setup.of(f"""--rl-env-config '{{"ctiy": "Oslo"}}' {env}"""),
        "misspelt method, parameter and name": Setup.of(
            env, score_episode="score_epsiode", **{"completion, answer": "completion, anwser", "float(": "flaot("}
        ),
        "syntax error": colon,
        "scores outside of the range": range_,
    }


# -- the rules

Rule = Callable[[Setup, re.Match[str]], bool]


def _rename(setup: Setup, found: re.Match[str]) -> bool:
    return setup.rename(found["word"], found["by"].rstrip("?.,"))


def _set(setup: Setup, found: re.Match[str]) -> bool:
    return setup.set_flag(found["flag"], found["value"].rstrip("?.,"))


def _remove(setup: Setup, found: re.Match[str]) -> bool:
    return setup.remove_flag("--" + found["option"].replace("_", "-"))


def _end_with_colon(setup: Setup, found: re.Match[str]) -> bool:
    name, number = Path(found["file"]).name, int(found["line"]) - 1
    lines = setup.files[name].splitlines()
    lines[number] += ":"
    setup.files[name] = "\n".join(lines) + "\n"
    return True


RULES: Sequence[tuple[str, Rule]] = (
    (r"(?P<file>\S+), line (?P<line>\d+): SyntaxError: expected ':'", _end_with_colon),
    (r"unknown option (?P<word>\S+?)(?: \(in \S+\))?\. (?:Use|Did you mean) (?P<by>\S+)", _rename),
    (r"(?:no (?:file|module|class|folder)|does not take|unknown parameter,|name|attribute|It has)"
     r" '?(?P<word>[\w./-]*\w)'?(?=[ .,:;])(?s:.*?)Did you mean (?P<by>\S+?)\?", _rename),
    (r"(?:Use|Add|Set|such as|with|add) (?P<flag>--[a-z-]+) (?P<value>[^\s-]\S*)", _set),
    (r"\((?P<flag>--rl-score-range) LOW,HIGH or (?P<value>any)\)", _set),
    (r"^(?P<option>[a-z_]+): (?s:.*)(?:Leave it out|leave it out|[Oo]mit)", _remove),
)  # fmt: skip
"""Forms of messages, and what to do about them."""


@dataclass
class Outcome:
    """What came of a set-up."""

    trained: bool
    messages: list[str] = field(default_factory=list)
    """The messages that were answered."""

    @property
    def commands(self) -> int:
        """Commands that were run."""
        return len(self.messages) + self.trained


def repair(setup: Setup, run: Run, folder: Path) -> Outcome:
    """Run the command, and change the set-up by the message of its failure, until it trains."""
    outcome = Outcome(False)
    for _ in range(COMMANDS):
        for name, text in setup.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        *_, last = run(["grpo", "--json", *setup.arguments], folder).splitlines() or ["{}"]
        event = json.loads(last)
        if event.get("event") == "RunResult":
            outcome.trained = True
            break
        outcome.messages.append(f"{event.get('message')}\n{event.get('warnings', '')}".strip())
        if not apply_rule(setup, outcome.messages[-1]):
            break
    return outcome


def apply_rule(setup: Setup, message: str) -> bool:
    """Change the set-up by the first rule that the message matches and that changes something."""
    return any((found := re.search(form, message)) is not None and rule(setup, found) for form, rule in RULES)


def _command(arguments: Sequence[str], folder: Path) -> str:
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "aitrain", *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False).stdout


def main(names: Sequence[str]) -> int:
    """Repair the set-ups whose names hold one of the words, or all; returns the exit code."""
    chosen = {name: one for name, one in setups().items() if not names or any(word in name for word in names)}
    repaired = 0
    for name, setup in chosen.items():
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="aitrain-repair-") as folder:
            outcome = repair(setup, _command, Path(folder))
        repaired += outcome.trained
        state = f"{outcome.commands} commands" if outcome.trained else f"not repaired: {outcome.messages[-1]}"
        print(f"{name:40} {time.monotonic() - start:5.0f} s  {state}", flush=True)
    print(f"{repaired} of {len(chosen)} repaired with at most {COMMANDS} commands each")
    return 0 if repaired == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
