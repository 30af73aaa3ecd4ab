"""The documentation: what it links to and names exists, and made pages are what their generators write."""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from aitrain.cli.main import load_command
from aitrain.environment.adapters import ADAPTERS
from aitrain.environment.judges.rules import RULES
from aitrain.execution.failure import FAILURE_KINDS
from aitrain.options.sweep import SweepConfig
from aitrain.runs.records import RolloutRecord
from aitrain.workbench.check.registry import CHECKS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

sys.path.insert(0, str(DOCS))
import write_reference  # noqa: E402
import write_scaling_tables  # noqa: E402


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


# -- links


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get on the site."""
    titles = re.findall(r"^#+ (.+)$", CODE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_a_page_and_a_heading(page: Path) -> None:
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", CODE.sub("", text_of(page))):
        target = page.parent / file if file else page
        assert target.exists(), file
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{file}#{anchor}"


# -- names


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("run-folder.md", [field.name for field in fields(RolloutRecord)]),
        ("sweep.md", list(SweepConfig.model_fields)),
        (
            "env-workbench.md",
            [*(check.name for check in CHECKS), *(f"aitrain env {name}" for name in load_command("env").commands)],
        ),
        ("adapters.md", list(ADAPTERS)),
        ("judges.md", list(RULES)),
        ("environments.md", [f"failed/{kind}" for kind in FAILURE_KINDS]),
    ],
)
def test_a_page_names_all_that_it_is_the_reference_of(page: str, names: list[str]) -> None:
    text = text_of(DOCS / page)
    assert [name for name in names if not re.search(rf"`{name}\b", text)] == []


# -- made pages


def test_made_pages_are_those_that_make_docs_writes() -> None:
    stale = [file.name for file, text in write_reference.FILES.items() if text_of(file) != text()]
    assert not stale, "run `make docs`"


@pytest.mark.slow
def test_the_tables_of_models_are_those_that_make_docs_writes() -> None:
    for page in write_scaling_tables.TABLES:
        assert write_scaling_tables.with_tables(page) == text_of(page), page.name
