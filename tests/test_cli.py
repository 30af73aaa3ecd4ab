"""The command line itself: help, options that are searched, and runs that may not be read."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import run_in_process


def test_options_are_searched_by_words_of_names_and_descriptions_and_by_other_tools_names() -> None:
    def found(words: str) -> str:
        return run_in_process(f"options {words}")[1]

    assert re.findall(r"^  --\S+", found("clip rise"), re.MULTILINE) == ["  --rl-clip-range-high"]
    assert "Use rl_kl_coef." in run_in_process("options -- --beta")[2]
    assert "max_steps" in {one["name"] for one in json.loads(found("max-steps --json"))}
    assert run_in_process("options zzz")[0] == 2


def test_a_port_that_is_taken_is_named_with_the_option_for_another_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, said = run_in_process(f"view --port {port}")
    assert code == 2
    assert str(port) in said
    assert "--port" in said


@pytest.fixture
def as_other_user(tmp_path: Path) -> list[str]:
    """Start of a command that may not enter tmp_path/runs/closed, also if the tests run as root."""
    for name in ("closed", "open"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "status.json").write_text("{}")
    (tmp_path / "runs" / "closed").chmod(0)
    setpriv = shutil.which("setpriv")
    if os.geteuid() == 0 and setpriv is None:
        pytest.skip("root may read everything")
    drop = ["--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    return [setpriv, *drop, sys.executable] if setpriv and os.geteuid() == 0 else [sys.executable]


def test_a_run_that_may_not_be_read_is_said_in_one_line_and_leaves_the_others_on_the_page(
    as_other_user: list[str], tmp_path: Path
) -> None:
    def said(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*as_other_user, *words], cwd=tmp_path, capture_output=True, text=True, check=False)

    for command in ("show", "eval --rl-env envs.arithmetic"):
        done = said("-m", "aitrain", *command.split(), "runs/closed")
        assert done.returncode == 2
        assert re.fullmatch(r"aitrain: runs/closed\S*: Permission denied\n", done.stderr)
    done = said("-c", "from aitrain.ui.run_registry import *; print(*runs_of(places(['runs'])))")
    assert done.stdout == "open\n", done.stderr


@pytest.mark.parametrize("command", ["show ~no-such-user/x", "eval ~no-such-user/x", "compare ~no-such-user/x"])
def test_the_home_of_a_user_who_is_none_is_a_place_that_does_not_exist(command: str, here: Path) -> None:
    code, _, err = run_in_process(command)
    assert (code, "~no-such-user/x" in err) == (2, True), err


def test_a_plan_for_the_home_of_a_user_who_is_none_is_made(here: Path) -> None:
    code, out, err = run_in_process("plan --model tiny --rl-env envs.arithmetic --output-dir ~no-such-user/x")
    assert (code, "~no-such-user/x" in out) == (0, True), err
