"""The rules of the house: a light command line, declared dependencies, nothing of one machine in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import aitrain
from aitrain.options.documentation import options_page
from aitrain.options.train import TrainConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aitrain"

HEAVY = {"torch", "transformers", "peft", "datasets", "trl", "accelerate", "vllm", "numpy", "safetensors", "tokenizers"}


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["doctor"], ["runs"], ["grpo", "--help"], ["grpo", "--no-such-flag"],
     ["eval", "tiny", "--rl-env", "nowhere.py:Env"],
     ["env", "play", "nowhere.py"],
     ["serve", "tiny", "--print"],
     ["grpo", "--rl-env", "envs.arithmetic", "--model", "tiny", "--dry-run", "--trl", "delta=2"]],
    ids=" ".join,
)  # fmt: skip
def test_light_commands_load_nothing_heavy(arguments: list[str], preloaded_aitrain: Path) -> None:
    """In the process of the command; one that it starts to load the environment with TRL is forked."""
    python = str(preloaded_aitrain / "preloaded-python")
    forks = f"from aitrain.launch import local_processes\nlocal_processes.PYTHON[0] = {python!r}\n"
    code = (
        (forks if "--dry-run" in arguments else "") + f"import sys; sys.argv[1:] = {arguments!r}\n"
        "from aitrain.cli.main import _run\n"
        "_run()\n"
        f"print('HEAVY', *sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "HEAVY"


def test_the_version_is_the_package_version() -> None:
    assert f'version = "{aitrain.__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_every_library_that_is_imported_is_a_declared_dependency() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    declared = [
        *project["dependencies"],
        *(one for extra in project["optional-dependencies"].values() for one in extra),
    ]
    names = {re.split(r"[<>=\[]", one)[0].lower().replace("-", "_") for one in declared}
    names |= {"yaml", "pydantic_core", "tokenizers", "pandas", "pyarrow"}  # of pyyaml, pydantic, transformers, datasets
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported = {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"aitrain"}
            assert imported <= names, f"{file.name} imports {imported - names}"


def test_the_page_of_options_is_fresh() -> None:
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == options_page(TrainConfig), "run `make docs`"


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, cwd=ROOT)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_file_holds_a_path_of_one_machine_or_a_secret() -> None:
    wrong = re.compile(
        "|".join(["/ro" + "ot/", "/wo" + "rk/", "/ho" + "me/[a-z]", "hf_[A-Za-z]{30}", "pypi\\.or" + "g"])
    )
    for file in tracked():
        if file.suffix in {".py", ".md", ".toml", ".txt", ".json", ".jsonl", ".yaml", ".yml", ""}:
            found = wrong.search(file.read_text(encoding="utf-8", errors="replace"))
            assert found is None, f"{file.relative_to(ROOT)}: {found and found.group()}"
