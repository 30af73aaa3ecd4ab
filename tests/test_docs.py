"""Every example in README and docs is run, in the order of its page, in an empty folder.

A block's info string says what is done: `python file=NAME` is written there, with `run` it is executed as well, `bash`
is executed, `bash dry-run` with --dry-run, and `bash plan` as `aitrain plan`, for models that a test cannot download.
`bash needs=NAME` is executed where the package of the adapter NAME is installed, as in .ci/adapters. Of `bash vllm` the
options are checked, as if vLLM were installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aitrain.environment.adapters import ADAPTERS
from aitrain.packages import version_of
from aitrain.runs.run_folder import read_object

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(python|bash)(.*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if BLOCK.search(page.read_text(encoding="utf-8"))
]
FAST_PAGES = ("extending.md", "algorithms.md", "choosing.md", "memory.md", "options.md", "python-api.md", "step.md")
"""Pages whose examples the fast suite runs: those that take seconds."""
LEARN = {"README.md": ("sums", "python"), "tutorial.md": ("my_task",)}
"""Runs of pages whose held-out score must rise."""


def run_block(language: str, info: str, text: str, folder: Path, commands: Path) -> None:
    """Do what the block's info string says."""
    if "vllm" in info:
        stub = folder / "installed" / "vllm.py"  # the working directory does not count
        stub.parent.mkdir(exist_ok=True)
        stub.touch()
        checked = f"PYTHONPATH=installed:$PYTHONPATH {text.rstrip().replace('aitrain grpo', 'aitrain plan')}"
        execute(["bash", "-euo", "pipefail", "-c", checked], folder, folder)
        return
    if language == "bash":
        text = text.replace("aitrain grpo", "aitrain plan") if "plan" in info else text
        execute(
            ["bash", "-euo", "pipefail", "-c", text.rstrip() + " --dry-run" * ("dry-run" in info)], folder, commands
        )
        return
    name = re.search(r"file=(\S+)", info)
    assert name, f"a block of Python without a file name: {text[:60]}"
    (folder / name.group(1)).write_text(text)
    if " run" in info:
        execute(["preloaded-python", "-P", "-m", name.group(1)], folder, commands)


def execute(command: list[str], folder: Path, commands: Path) -> None:
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {"PYTHONPATH": "", **os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
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
        if adapter is not None and adapter.package and version_of(adapter.package) is None:
            missing.add(str(adapter.package))
        else:
            run_block(language, info, text, tmp_path, preloaded_aitrain)

    for name in LEARN.get(page.name, ()):
        result = read_object(tmp_path / "runs" / name / "result.json")
        assert result["score_after"] > result["score_before"] + 0.15
    if missing:
        pytest.skip(f"{', '.join(sorted(missing))} is not installed: some examples were not run")
