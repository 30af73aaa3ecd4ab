"""The rules of the house: layers, sizes, exported names, fresh docs, nothing of one machine in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import warnings
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import aitrain
from aitrain.options.documentation import options_page
from aitrain.options.train import TrainConfig

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aitrain"

MODULE_LINES, CLASS_LINES, ANY_PER_1000_LINES = 400, 200, 12

HEAVY = {"torch", "transformers", "peft", "datasets", "trl", "accelerate", "vllm", "numpy", "safetensors", "tokenizers"}
NO_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "base", "manager", "misc"}


@cache
def sources() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in file.parts]


@cache
def classes() -> list[ast.ClassDef]:
    return [node for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(file, ast.parse(file.read_text(encoding="utf-8"))) for file in sources()]


def test_no_module_has_a_name_that_says_nothing() -> None:
    for file in sources():
        assert NO_NAMES.isdisjoint(file.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["doctor"], ["schema"], ["plan", "--help"], ["runs"], ["view", "--help"], ["show", "--help"],
     ["grpo", "--help"], ["grpo", "--no-such-flag"],
     ["grpo", "--rl-env", "nowhere.py:Env"],
     ["eval", "--help"], ["eval", "tiny"], ["eval", "tiny", "--rl-env", "nowhere.py:Env"],
     ["env", "list"], ["sweep", "nowhere.yaml"],
     ["env", "play", "nowhere.py"],
     ["env", "show", "envs.arithmetic", "-E", "casse=1"],
     ["env", "rescore", "nowhere"],
     ["export", "nowhere/at/all"],
     ["serve", "tiny", "--print"],
     ["grpo", "--rl-env", "envs.arithmetic", "--model", "tiny", "--dry-run", "--trl", "delta=2"]],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.slow
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


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["nothing"], ["runs", "--help"], ["show", "--help"], ["view", "--help"],
     ["demo", "--help"], ["doctor", "--help"], ["data", "--help"], ["schema", "--help"], ["env", "--help"],
     ["env", "init", "--help"], ["env", "play", "--help"], ["env", "rescore", "--help"], ["export", "--help"],
     ["serve", "--help"], ["sweep", "--help"]],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.slow
def test_help_of_commands_without_options_of_a_run_needs_no_pydantic(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv[1:] = {arguments!r}\n"
        "from aitrain.cli.main import _run\n"
        "_run()\n"
        "print('LOADED', *sorted({'pydantic', 'yaml', 'aitrain.options.section'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_the_shop_window_shows_what_it_says_and_sorted() -> None:
    assert list(aitrain.__all__) == sorted(aitrain.__all__)
    assert all(hasattr(aitrain, name) for name in aitrain.__all__)


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
    for file_name, tree in trees():
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported = {module.split(".")[0] for module in modules} - sys.stdlib_module_names - {"aitrain"}
            assert imported <= names, f"{file_name} imports {imported - names}"


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


def test_modules_are_short() -> None:
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in sources()}
    assert not {file.name: length for file, length in lengths.items() if length > MODULE_LINES}


def test_classes_are_short() -> None:
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in classes()}
    assert not {name: length for name, length in lengths.items() if length > CLASS_LINES}


def test_no_two_public_classes_have_the_same_name() -> None:
    counts = Counter(node.name for node in classes() if not node.name.startswith("_"))
    assert not {name: count for name, count in counts.items() if count > 1}


def test_few_types_are_any() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in sources()}
    found = {str(file.relative_to(ROOT)): len(re.findall(r"\bAny\b", text)) for file, text in texts.items()}
    lines = sum(len(text.splitlines()) for text in texts.values())
    most = dict(sorted(found.items(), key=lambda pair: -pair[1])[:10])
    assert sum(found.values()) * 1000 / lines <= ANY_PER_1000_LINES, most


def test_every_public_name_of_the_package_has_a_docstring() -> None:
    for file, tree in trees():
        assert ast.get_docstring(tree), f"{file.relative_to(ROOT)} does not say what it is"
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{file.relative_to(ROOT)}: {node.name} does not say what it is"


def test_a_warning_from_our_own_code_fails_a_test() -> None:
    with pytest.raises(UserWarning):
        warnings.warn_explicit("something is off", UserWarning, "train.py", 1, module="aitrain.options.train")
