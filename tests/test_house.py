"""The rules of the house: floors, the wall, exported names, fresh docs, nothing of one machine in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import aitrain
from aitrain.knobs import as_markdown

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aitrain"

FLOORS = {
    "errors": 0, "packages": 0, "machine": 0, "vllm_ranks": 0, "activity": 0,
    "privacy": 0, "events": 0.1, "values": 0.1, "loss_types": 0.1, "config": 0.2,
    "batch": 1, "knobs": 1, "run_folder": 1, "heartbeat": 1.1, "runs": 1.2, "environment": 1, "checkpoint": 1.5,
    "watchdog": 1.6, "report": 1.6, "launch": 2,
    "notebook": 3, "cli": 3, "__main__": 4,
}  # fmt: skip
"""The light wing, with steps inside the ground floor; `__init__` is the shop window and may show any floor."""

HEAVY_FLOORS = {
    "model": 1, "chat": 1, "dataset": 1.5, "trl_arguments": 2, "hub": 1, "provenance": 1, "tiny_model": 1,
    "holding_out": 1, "stopwatch": 2, "tracking": 5, "warm_up": 5,
    "finite": 1, "flat": 1, "kept_rows": 1, "padding": 1, "epochs": 1, "generation": 2, "rollout": 3, "trainer": 4,
    "scopes": 1, "episode_metrics": 3.5, "logprobs": 3.5, "optimizing": 3.6,
    "evaluation": 5, "alarms": 5, "saving": 5,
    "joining": 2, "run_recorder": 4, "callbacks": 5.1, "checkpoints": 5.2,
    "run": 6, "worker": 7,
}  # fmt: skip
WITHIN = {
    "contract": 0, "seeds": 0, "row_copies": 0, "source_code": 0, "finding": 1, "loading": 2, "failures": 3, "calls": 3,
    "watching": 2.5, "abstract_values": 2.6, "state_report": 2.7, "effects": 2.75, "access_log": 2.8,
    "attribute_reader": 2.85, "call_reader": 2.9, "expression_reader": 2.95, "state_analysis": 3, "call_policy": 4,
    "workers": 4, "judging": 4, "tools": 4, "isolation": 5,
    "dialogue": 5, "scoring": 6,
    "trl_fields": 0, "libraries": 0, "nvidia": 0, "memory": 0.5, "vllm_server": 0, "keeper": 0,
    "shape": 0, "room": 0.3, "capacity": 0.6,
    "preflight": 1, "serving": 2, "processes": 3,
    "json_values": 0, "rollout_record": 0.1, "metrics_line": 0.1, "environment_source": 0, "intervals": 0,
    "held_out": 0.5, "rollout_index": 0.5, "run_list": 0.5,
    "escape_controls": 0, "duration": 0, "plot": 0, "log_tail": 0, "block": 0, "dashboard": 1, "terminal": 2,
    "cases": 1, "episodes": 1, "page": 1, "summary": 1, "sampling": 2,
    "reward_plot": 2, "run_registry": 2, "card": 3, "transcript": 3, "server": 3, "report_writer": 3,
    "tied_head": 0, "weights": 0, "row_sampling": 0, "batching": 1, "colocated": 1, "served": 1, "agreement": 2,
    "stopping": 0, "local": 3, "comparison": 4,
    "completion": 0, "loudness": 0, "running": 1, "grpo": 1.5,
    "demo": 2, "doctor": 2, "pager": 1, "runs": 2, "show": 2, "view": 2, "plan": 2, "main": 3,
}  # fmt: skip
"""Floors inside the rooms that have several files."""

HEAVY = {"torch", "transformers", "peft", "datasets", "trl", "accelerate", "vllm", "numpy", "safetensors", "tokenizers"}
NO_NAMES = {"utils", "util", "common", "helpers", "helper", "core", "base", "manager", "misc"}


def sources() -> list[Path]:
    return [file for file in sorted(PACKAGE.rglob("*.py")) if "__pycache__" not in file.parts]


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """(module, is it at the top of the file) for each import."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            is_package = (ROOT / node.module.replace(".", "/")).is_dir()
            yield from ((name if is_package else node.module, id(node) in top) for name in names)


def room(module: str) -> str:
    """`aitrain.training.run` is in the room `run`, `aitrain.environment.loading` in `environment`."""
    parts = module.split(".")
    return (parts[2] if parts[1] == "training" and len(parts) > 2 else parts[1]) if len(parts) > 1 else "__init__"


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def floor(module: str) -> float:
    """The floor of a module, with a fraction for its place inside its room."""
    is_heavy = module.startswith("aitrain.training.")
    floors = HEAVY_FLOORS if is_heavy else FLOORS
    has_floors = not is_heavy or room(module) == "generation"
    return floors[room(module)] + (WITHIN.get(module.split(".")[-1], 0) / 10 if has_floors else 0)


def test_every_room_has_a_floor_and_a_name() -> None:
    for file in sources():
        module = name_of(file)
        if module not in ("aitrain", "aitrain.training"):
            assert floor(module) >= 0
        assert NO_NAMES.isdisjoint(module.split("."))


@pytest.mark.parametrize("file", sources(), ids=lambda file: name_of(file))
def test_a_room_imports_only_from_lower_floors(file: Path) -> None:
    module = name_of(file)
    if module in ("aitrain", "aitrain.training") or file.name == "__init__.py":
        return
    for imported, _ in imports(file):
        if not imported.startswith("aitrain."):
            continue
        is_heavy = imported.startswith("aitrain.training.")
        if is_heavy and not module.startswith("aitrain.training."):
            assert module == "aitrain.notebook", f"{module} reaches through the wall to {imported}"
        elif module.startswith("aitrain.training.") and not is_heavy:
            assert floor(imported) < 2, f"the heavy wing uses {imported}, above the first floor"
        else:
            assert floor(imported) < floor(module), f"{module} imports {imported} from its own floor or above"


@pytest.mark.parametrize("file", sources(), ids=lambda file: name_of(file))
def test_the_light_wing_imports_nothing_heavy(file: Path) -> None:
    if name_of(file).startswith("aitrain.training"):
        return
    assert not {module.split(".")[0] for module, _ in imports(file)} & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["doctor"], ["plan", "--help"], ["runs"], ["view", "--help"], ["show", "--help"],
     ["grpo", "--help"], ["grpo", "--no-such-flag"],
     ["grpo", "--rl-env", "nowhere.py:Env"],
     ["grpo", "--rl-env", "envs.arithmetic", "--model", "tiny", "--dry-run", "--trl", "delta=2"]],
    ids=" ".join,
)  # fmt: skip
def test_light_commands_load_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv[1:] = {arguments!r}\n"
        "from aitrain.cli.main import _run\n"
        "_run()\n"
        f"print('HEAVY', *sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "HEAVY"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["nothing"], ["runs", "--help"], ["show", "--help"], ["view", "--help"],
     ["demo", "--help"], ["doctor", "--help"], ["data", "--help"]],
    ids=" ".join,
)  # fmt: skip
def test_help_of_commands_without_options_of_a_run_needs_no_pydantic(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv[1:] = {arguments!r}\n"
        "from aitrain.cli.main import _run\n"
        "_run()\n"
        "print('LOADED', *sorted({'pydantic', 'yaml', 'aitrain.config'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_the_shop_window_shows_what_it_says_and_sorted() -> None:
    assert list(aitrain.__all__) == sorted(aitrain.__all__)
    assert all(hasattr(aitrain, name) for name in aitrain.__all__)


def test_the_version_is_the_package_version() -> None:
    assert f'version = "{aitrain.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_the_page_of_knobs_is_fresh() -> None:
    assert (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8") == as_markdown(), "run `make docs`"


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


def test_functions_are_short_and_take_few_arguments() -> None:
    """About ten lines and about three arguments: the median says it, the limit catches what has grown."""
    lengths = []
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = [child for child in node.body if not _is_docstring(child)]
                length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 1
                lengths.append(length)
                where = f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
                assert length <= 32, f"{where} has {length} lines"
                own = [argument for argument in node.args.args if argument.arg not in ("self", "cls")]
                assert len(own) <= 5, f"{where} has {len(own)} arguments"
    assert sorted(lengths)[len(lengths) // 2] <= 10


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_every_public_name_of_the_package_has_a_docstring() -> None:
    for file in sources():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{file.relative_to(ROOT)} does not say what it is"
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{file.relative_to(ROOT)}: {node.name} does not say what it is"


@pytest.mark.parametrize(
    "command", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join
)
def test_the_linters_pass(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_warning_from_our_own_code_fails_a_test() -> None:
    with pytest.raises(UserWarning):
        warnings.warn_explicit("something is off", UserWarning, "config.py", 1, module="aitrain.config")
