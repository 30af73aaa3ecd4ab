"""The rules of the house: a light command line, nothing of one machine in the tree."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAVY = {"torch", "transformers", "peft", "datasets", "trl", "accelerate", "vllm", "numpy", "safetensors", "tokenizers"}


@pytest.mark.parametrize(
    "arguments",
    ["doctor", "show", "serve tiny --print", "eval tiny --rl-env nowhere.py:Env",
     "grpo --rl-env envs.arithmetic --model tiny --dry-run --trl num_iterations=2"],
)  # fmt: skip
def test_light_commands_load_nothing_heavy(arguments: str, preloaded_aitrain: Path) -> None:
    """In the process of the command; one that it starts to load the environment with TRL is forked."""
    python = str(preloaded_aitrain / "preloaded-python")
    forks = f"from aitrain.launch import processes\nprocesses.PYTHON[0] = {python!r}\n"
    code = (
        (forks if "--dry-run" in arguments else "") + f"import sys; sys.argv[1:] = {arguments.split()!r}\n"
        "from aitrain.cli.main import _run\n"
        "_run()\n"
        f"print('HEAVY', *sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "HEAVY"


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
