"""The command line itself: help, versions, plans, and what --debug adds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Run, listing


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "aitrain", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def as_other_user(tmp_path: Path) -> list[str]:
    """Start of a command that may not enter tmp_path/runs/closed, also if the tests run as root."""
    for name in ("closed", "open"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text("{}")
    (tmp_path / "runs" / "closed").chmod(0)
    setpriv = shutil.which("setpriv")
    if os.geteuid() == 0 and setpriv is None:
        pytest.skip("root may read everything")
    drop = ["--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    return [setpriv, *drop, sys.executable] if setpriv and os.geteuid() == 0 else [sys.executable]


@pytest.mark.parametrize("command", ["show", "compare", "eval --rl-env envs.arithmetic", "env rescore", "chat"])
def test_a_run_that_may_not_be_read_is_said_in_one_line(command: str, as_other_user: list[str], tmp_path: Path) -> None:
    asked = [*as_other_user, "-m", "aitrain", *command.split(), "runs/closed"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"aitrain: runs/closed\S*: Permission denied\n", done.stderr)


def test_a_run_that_may_not_be_read_does_not_keep_the_others_from_the_page(
    as_other_user: list[str], tmp_path: Path
) -> None:
    code = "from aitrain.ui.run_registry import *; print(*RunRegistry(places(['runs'])).runs())"
    done = subprocess.run([*as_other_user, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "open\n", done.stderr


@pytest.mark.parametrize("arguments", [[], ["data"]], ids=str)
def test_a_missing_command_is_answered_with_the_help(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: aitrain")
    assert "Commands:" in done.stderr


def test_help_shows_the_ten_most_used_options_first_and_where_the_others_are() -> None:
    text = run("grpo", "--help").stdout
    assert text.index("  --model TEXT\n") < text.index("  --project-name TEXT\n") < text.index("  --config FILE\n")
    assert text.count("\n  --") == 10 + 7
    assert "--vllm-mode" not in text
    assert "--help-all" in text
    assert "aitrain demo" in text


def test_options_are_searched_by_words_of_names_and_descriptions_and_by_other_tools_names() -> None:
    assert re.findall(r"^  --\S+", run("options", "clip", "dual").stdout, re.MULTILINE) == ["  --rl-dual-clip"]
    assert "--rl-kl-coef" in run("options", "--", "--beta").stdout
    found = json.loads(run("options", "max-steps", "--json").stdout)
    assert [one["flag"] for one in found if one["name"] == "max_steps"] == ["--max-steps"]
    nothing = run("options", "zzz")
    assert nothing.returncode == 2


def test_flags_may_be_written_as_aitraining_writes_its_aliases(aitrain_grpo: Run) -> None:
    done = aitrain_grpo("--model", "tiny", "--rl_env_module", "envs.arithmetic", "--rl_num_generations=8", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "1 prompt x 8 completions = 8 a step" in done.stdout


def test_a_dry_run_shows_the_plan_and_makes_nothing(aitrain_grpo: Run, here: Path) -> None:
    named = ["--model", "tiny", "--rl-env", "envs.arithmetic", "--project-name", "mine"]
    done = aitrain_grpo(*named, "--rl-prompts-per-step=6", "--num-processes=3", "--max-steps=7", "--dry-run")

    assert done.returncode == 0, done.stderr
    plan = {line[:12].strip(): line[13:] for line in done.stdout.splitlines()}
    step = "6 prompts x 4 completions = 24 a step = 3 processes x 8"
    assert plan["batch"] == f"{step}, in forward passes of up to 8 completions, sorted by length"
    assert plan["steps"] == "7"
    assert plan["processes"] == "3 on CPU"
    assert plan["run folder"] == "runs/mine"
    assert plan["environment"].endswith("arithmetic.py")
    assert listing(here) == []
