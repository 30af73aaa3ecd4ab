"""Every command that is printed, in messages, help, pages and docs, exists and takes the flags that stand behind it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from aitrain.cli.main import COMMANDS, load_command

ROOT = Path(__file__).parents[1]
ENV_COMMANDS = load_command("env").commands  # type: ignore[attr-defined]
SOURCES = sorted((ROOT / "aitrain").rglob("*.py"))
TEXTS = [
    *sorted((ROOT / "aitrain").rglob("*.js")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.ipynb")), *sorted((ROOT / "docs" / "examples").iterdir()),
    *sorted((ROOT / "aitrain" / "envs").rglob("*.py")),
]  # fmt: skip
COMMAND = re.compile(r"(?<![\w./-])aitrain ((?:env )?[a-z][a-z-]*)(?![\w.(=])((?: +(?:\\\n *)?[^\s`\"\\;|)]+)*)")
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*(?![\w*])")


@cache
def flags_of(name: str) -> frozenset[str]:
    first, _, second = name.partition(" ")
    command = load_command(first)
    if second:
        command = command.commands[second]  # type: ignore[attr-defined]
    own = frozenset(flag for one in command.params for flag in (*one.opts, *one.secondary_opts)) | {"--help", "-h"}
    return flags_of("grpo") | {"--tiny"} if first == "recipe" else own  # `aitrain recipe run` takes those of grpo


def wrong(text: str) -> list[str]:
    """What is named in a text and does not exist; a name without backticks and flags may be prose."""
    found = []
    for match in COMMAND.finditer(text):
        name, rest = match.groups()
        first, _, second = name.partition(" ")
        flags = FLAG.findall(re.split(r"aitrain |, |: |\. | and | or | with ", rest)[0])
        if first not in COMMANDS or (second and second not in ENV_COMMANDS):
            is_command = flags or text[: match.start()].endswith("`")
            found += [f"aitrain {name}"] if is_command else []
        elif second or first != "env":  # a group
            found += [f"aitrain {name} {flag}" for flag in flags if flag not in flags_of(name)]
    return found


@pytest.mark.slow
def test_every_command_that_is_named_exists_with_its_flags() -> None:
    texts = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in (*SOURCES, *TEXTS)}
    found = {place: problems for place, text in texts.items() if (problems := wrong(text))}
    assert found == {}
    assert wrong("`aitrain grpoo`, aitrain grpo --modell x") == ["aitrain grpoo", "aitrain grpo --modell"]
