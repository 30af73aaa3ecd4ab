"""`aitrain env init`: six templates, each of which is tested, checked and trained as it is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aitrain.errors import ConfigError
from aitrain.workbench.opening import TEMPLATES, write_environment
from tests.conftest import run_in_process
from tests.workbench.check.test_faults import found

KINDS = sorted(path.name.partition("_test.")[0] for path in TEMPLATES.glob("*_test.py.txt"))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment of each kind; its name has a space."""
    folder = tmp_path_factory.mktemp("my envs")
    for kind in KINDS:
        write_environment(f"of_{kind}", kind, folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_the_checks_find_no_fault_in_a_template(written: Path, kind: str) -> None:
    assert list(found(f"{written}/of_{kind}.py")) == []


# -- names


@pytest.mark.parametrize("name", ["json", "folder/hotel", "2048", "class", "test_hotel"])
def test_a_name_that_python_or_pytest_would_take_for_another_is_refused(here: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="NAME: "):
        write_environment(name, "plain", here)
    assert list(here.iterdir()) == []


def test_existing_files_are_left_as_they_are(here: Path) -> None:
    (here / "test_hotel.py").write_text("mine")
    with pytest.raises(ConfigError, match="is left as it is"):
        write_environment("hotel", "plain", here)
    assert (here / "test_hotel.py").read_text() == "mine"
    assert len(list(here.iterdir())) == 1


# -- the command


def test_the_next_two_commands_are_printed_and_the_environment_is_ready(here: Path) -> None:
    _, out, _ = run_in_process("env init my_task")
    commands = [line.split() for line in out.splitlines() if line.startswith("  aitrain ")]
    assert [command[:2] for command in commands] == [["aitrain", "env"], ["aitrain", "grpo"]]
    assert "class MyTask" in (here / "my_task.py").read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(here)]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
