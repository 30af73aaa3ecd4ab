"""docs/architecture.md names only what exists: files, classes, functions, rooms; its picture is that of its text."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aitrain"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DRAWING = ROOT / "docs" / "draw_data_flow.py"

REFERENCE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|js|toml|dot))(?:: ([\w., ]+))?`")
"""`room/file.py`, or `room/file.py: name, Class.method`."""
WALK_FILES = 7


def sections(level: str) -> dict[str, str]:
    """The parts of the page below each heading of a level, by the heading."""
    parts = re.split(rf"^{level} (.+)$", PAGE, flags=re.MULTILINE)[1:]
    return {
        title: re.split(r"^#", text, flags=re.MULTILINE)[0] for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def rows(section: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = [line for line in sections("##")[section].splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def references(text: str) -> Iterator[tuple[Path, list[str]]]:
    """Each file that a text names, with the names in it."""
    for file, names in REFERENCE.findall(text):
        places = [place / file for place in (PACKAGE, ROOT)]
        found = [place for place in places if place.is_file()]
        assert found, f"there is no {file}"
        yield found[0], [name.strip() for name in names.split(",")] if names else []


@cache
def names_in(file: Path) -> set[str]:
    """What a module defines: `name`, and `Class.member` for each member of a class."""
    return set(_defined(ast.parse(file.read_text(encoding="utf-8")).body))


def _defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _defined(node.body, f"{node.name}.")
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


def rooms() -> list[str]:
    """The rooms in the order of the layers, the highest first."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = [name.removeprefix("aitrain.") for name in contracts[0]["layers"]]
    found = [name for name in layers if (PACKAGE / name).is_dir()]
    assert set(found) == {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    return found


def words_of(text: str) -> list[str]:
    """The words of a text that are written like classes: `EnvRunner`."""
    return re.findall(r"\b[A-Z]\w*[a-z]\w*\b", text)


def test_every_file_and_name_of_the_page_exists() -> None:
    found = list(references(PAGE))
    assert len(found) > 150
    for file, names in found:
        missing = set(names) - names_in(file) if names else set()
        assert not missing, f"{file.relative_to(ROOT)} has no {missing}"


def test_every_room_has_a_row_in_the_order_of_the_layers_with_its_classes() -> None:
    table = rows("Rooms")
    assert [cells[0] for cells in table] == [f"`{room}/`" for room in rooms()]
    for room, (_, _, classes, _) in zip(rooms(), table, strict=True):
        defined = set().union(*map(names_in, (PACKAGE / room).glob("*.py")))
        assert set(words_of(classes)) <= defined, room
        assert words_of(classes), room


def test_a_row_says_for_each_light_room_that_it_may_not_import_the_heavy_wing() -> None:
    forbidden = {cells[0]: cells[3] for cells in rows("Rooms")}
    heavy = {"`jobs/`", "`training/`", "`engines/`"}
    assert {room for room, what in forbidden.items() if "the heavy wing" in what} == forbidden.keys() - heavy


def test_the_table_of_places_names_a_file_for_everything_that_one_may_want_to_change() -> None:
    table = rows("To change X, look in Y")
    assert len(table) >= 30
    for what, where in table:
        assert list(references(where)), what


def test_six_walks_lead_through_at_most_seven_files_each() -> None:
    after = PAGE.partition("## Six walks")[2].partition("\n## ")[0]
    walks = {title: text for title, text in sections("###").items() if f"### {title}\n" in after}
    assert len(walks) == 6
    for title, text in walks.items():
        steps = re.findall(r"^\d+\. (.*(?:\n   .*)*)", text, re.MULTILINE)
        assert all(REFERENCE.match(step) and names for step in steps for _, names in [next(references(step))]), title
        assert len({file for file, _ in references(text)}) <= WALK_FILES, title


def test_the_picture_is_that_of_its_text_and_names_what_exists() -> None:
    spec = importlib.util.spec_from_file_location("draw_data_flow", DRAWING)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for source in reversed(module.SOURCES):
        drawn = source.with_suffix(".svg").read_text(encoding="utf-8")
        assert f"{source.name} {module.digest(source)} " in drawn, "run `make docs`"
    assert "](data_flow.svg)" in PAGE

    boxes = re.findall(r'\[label="(\w+)/\\n(.+?)"', module.SOURCES[0].read_text(encoding="utf-8"))
    assert set(re.findall(r">(\w+)/<", drawn)) == {room for room, _ in boxes} == set(rooms()) - {"cli"}
    for room, label in boxes:
        defined = set().union(*map(names_in, (PACKAGE / room).glob("*.py")))
        assert set(words_of(label.replace("\\n", " "))) <= defined, room
        assert all((PACKAGE / room / file).is_file() for file in re.findall(r"\w+\.py", label)), room


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_files_of_the_package_that_a_page_names_exist(page: Path) -> None:
    named = REFERENCE.findall(page.read_text(encoding="utf-8"))
    of_package = [file for file, _ in named if file.partition("/")[0] in {*rooms(), "aitrain", "tests", "benchmarks"}]
    for file in of_package:
        assert any((place / file).is_file() for place in (PACKAGE, ROOT)), file
