"""Every command that is printed, in messages, help, pages and docs, exists and takes the flags that stand behind it."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from aitrain.cli.main import COMMANDS, load_command
from aitrain.ui.overview import Overview
from tests.ui.test_next_steps import run

ROOT = Path(__file__).parents[1]
ENV_COMMANDS = load_command("env").commands  # type: ignore[attr-defined]
SOURCES = sorted((ROOT / "aitrain").rglob("*.py"))
TEXTS = [
    *sorted((ROOT / "aitrain").rglob("*.js")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.ipynb")), *sorted((ROOT / "docs" / "examples").iterdir()),
    *sorted((ROOT / "aitrain" / "envs").rglob("*.py")),
]  # fmt: skip
COMMAND = re.compile(r"(?<![\w./-])aitrain ((?:env )?[a-z][a-z-]*)(?![\w.(=])((?:[^\n`\"]|\\\n)*)")
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*(?![\w*])")
PROSE = {"against", "and", "as", "by", "can", "cannot", "does", "each", "for", "from", "has", "import", "in", "is"}
PROSE |= {"itself", "of", "on", "or", "to", "two", "with"}
VERB = re.compile(r"[a-z]+s|said|\w+ed")


def strings(file: Path) -> Iterator[str]:
    """The texts of a Python file; of f-strings with X for each value."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def named(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands in a text, each with the flags behind it; `aitrain starts ...` is prose."""
    for name, rest in COMMAND.findall(text):
        known = name.split()[0] in COMMANDS
        if known or not (name in PROSE or VERB.fullmatch(name)):
            own = re.split(r"aitrain |[;|)]|, |: |\. |&& | and | or | with ", rest)[0]
            yield name, FLAG.findall(own)


@cache
def flags_of(name: str) -> frozenset[str]:
    first, _, second = name.partition(" ")
    command = load_command(first)
    if second:
        command = command.commands[second]  # type: ignore[attr-defined]
    own = frozenset(flag for one in command.params for flag in (*one.opts, *one.secondary_opts)) | {"--help", "-h"}
    return flags_of("grpo") | {"--tiny"} if first == "recipe" else own  # `aitrain recipe run` takes those of grpo


def wrong(text: str) -> list[str]:
    found = []
    for name, flags in named(text):
        first, _, second = name.partition(" ")
        if first not in COMMANDS or (second and second not in ENV_COMMANDS):
            found.append(f"aitrain {name}")
        elif second or first not in ("env", "data"):  # these are groups
            found += [f"aitrain {name} {flag}" for flag in flags if flag not in flags_of(name)]
    return found


@pytest.mark.slow
def test_every_command_that_is_named_exists_with_its_flags() -> None:
    found = {}
    for file in (*SOURCES, *TEXTS):
        texts = strings(file) if file.suffix == ".py" else [file.read_text(encoding="utf-8")]
        if problems := [one for text in texts for one in wrong(text)]:
            found[str(file.relative_to(ROOT))] = problems
    assert found == {}


@pytest.mark.parametrize("values", [{}, {"stopped_because": "(--patience 2)"}])
def test_the_commands_after_a_run_are_accepted(values: dict[str, object], tmp_path: Path) -> None:
    folder = run(tmp_path, "better", "rl_env: envs.arithmetic\nlr: 3.0e-05\npatience: 2", **values)
    commands = [step["command"] for step in Overview(folder.path).next_steps]
    assert commands
    for text in filter(None, (*commands, Overview(folder.path).continuing())):
        program, name, *arguments = shlex.split(text)
        assert program == "aitrain"
        load_command(name).make_context(name, arguments)
