"""The command line itself: help, options that are searched, and runs that may not be read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


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


def test_a_missing_command_is_answered_with_the_help() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: aitrain")
    assert "Commands:" in done.stderr


def test_options_are_searched_by_words_of_names_and_descriptions_and_by_other_tools_names() -> None:
    assert re.findall(r"^  --\S+", run("options", "clip", "dual").stdout, re.MULTILINE) == ["  --rl-dual-clip"]
    assert "--rl-kl-coef" in run("options", "--", "--beta").stdout
    found = json.loads(run("options", "max-steps", "--json").stdout)
    assert [one["flag"] for one in found if one["name"] == "max_steps"] == ["--max-steps"]
    nothing = run("options", "zzz")
    assert nothing.returncode == 2
