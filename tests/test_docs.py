"""Every example in README and docs is run, in the order of its page, in an empty folder.

A block's info string says what is done: `python file=NAME` is written there, with `run` it is executed as well, `bash`
is executed, and `bash dry-run` is executed with --dry-run, for models that a test cannot download. `bash needs=NAME` is
executed where the package of the adapter NAME is installed, as in .ci/adapters.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aitrain.environment.adapters import ADAPTERS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(python|bash)(.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)


FAST_PAGES = ("README.md", "tutorial.md")
"""Pages whose examples the fast suite runs."""


def run_block(language: str, info: str, text: str, folder: Path, *paths: Path) -> None:
    """Do what the block's info string says."""
    if language == "bash":
        execute(
            ["bash", "-euo", "pipefail", "-c", text.rstrip() + (" --dry-run" if "dry-run" in info else "")],
            folder,
            *paths,
        )
        return
    name = re.search(r"file=(\S+)", info)
    assert name, f"a block of Python without a file name: {text[:60]}"
    (folder / name.group(1)).write_text(text)
    if " run" in info:
        execute(["preloaded-python", "-P", "-m", name.group(1)], folder, *paths)


def execute(command: list[str], folder: Path, *paths: Path) -> None:
    path = os.pathsep.join([*map(str, paths), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", [
    pytest.param(page, marks=[] if page.name in FAST_PAGES else pytest.mark.slow, id=page.name) for page in PAGES
])  # fmt: skip
def test_the_examples_of_a_page_run_as_they_are(page: Path, tmp_path: Path, preloaded_aitrain: Path) -> None:
    missing = set()
    for language, info, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        needed = re.search(r"needs=(\S+)", info)
        adapter = ADAPTERS[needed.group(1)] if needed else None
        if adapter is not None and adapter.installed_version is None:
            missing.add(str(adapter.package))
        else:
            run_block(language, info, text, tmp_path, preloaded_aitrain)

    if page.name == "README.md":
        result = json.loads((tmp_path / "runs" / "sums" / "result.json").read_text())
        assert result["score_after"] > result["score_before"] + 0.2
    if missing:
        pytest.skip(f"{', '.join(sorted(missing))} is not installed: some examples were not run")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_example_of_several_turns_is_the_bundled_one() -> None:
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    blocks = {info.strip(): text for _, info, text in BLOCK.findall(page)}
    assert blocks["file=guess_number.py"] == (ROOT / "aitrain" / "envs" / "guess_number.py").read_text()


def test_what_benchmarks_import_from_tests_and_from_each_other_is_there() -> None:
    """Most of them run too long to be run here."""
    for file in (ROOT / "benchmarks").glob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.module.split(".")[0] in ("benchmarks", "tests")
            ):
                source = ROOT / f"{node.module.replace('.', '/')}.py"
                text = source.read_text(encoding="utf-8") if source.exists() else ""
                for name in (alias.name for alias in node.names):
                    is_defined = re.search(rf"^(class |def |async def |[\w, ]*)\b{name}\b", text, re.MULTILINE)
                    is_module = (source.with_suffix("") / f"{name}.py").exists()
                    assert is_defined or is_module, f"{file.name}: {node.module} has no {name}"


def test_every_benchmark_has_its_section_and_is_run_by_make() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    files = [file for file in (ROOT / "benchmarks").glob("*.py") if re.search(r"= _?options\(", file.read_text())]
    assert len(files) >= 9
    for name in (file.stem for file in files):
        assert f"\n## {name}: " in page, name
        assert f"\npython -m benchmarks.{name} " in page, name
        assert re.search(rf"-m benchmarks\.{name}( --|$)", made, re.MULTILINE), name
