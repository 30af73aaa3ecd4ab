"""`aitrain env init`: five templates, each of which is tested, checked and trained as it is written."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from aitrain import TrainConfig
from aitrain.cli.env_init import env_init
from aitrain.errors import ConfigError
from aitrain.workbench.check.registry import CHECKS, run_checks
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.init import KINDS, write_environment
from aitrain.workbench.opening import open_environment

IN_PROCESSES = ("repeatable-dataset", "two-ranks")


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
    config = TrainConfig(rl_env=str(written / f"of_{kind}.py"))
    opened, config = open_environment(config)
    found = []
    with closing(Subject(opened, config)) as subject:
        for result in run_checks(subject, [check for check in CHECKS if check.name not in IN_PROCESSES]):
            found += result.findings
    assert [finding for finding in found if finding.level in ("fail", "warning")] == []


# -- names


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("json", "my_json"),
        ("folder/hotel", "hotel"),
        ("2048", "task_2048"),
        ("class", "my_class"),
        ("test_hotel", "hotel"),
    ],
)
def test_a_name_that_python_or_pytest_would_take_for_another_is_refused_with_one_that_works(
    here: Path, name: str, suggestion: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        write_environment(name, "plain", here)
    assert str(refused.value).endswith(f"\nTry: aitrain env init {suggestion}")
    assert list(here.iterdir()) == []
    write_environment(suggestion, "plain", here)


def test_existing_files_are_left_as_they_are(here: Path) -> None:
    (here / "test_hotel.py").write_text("mine")
    with pytest.raises(ConfigError, match="is left as it is"):
        write_environment("hotel", "plain", here)
    assert (here / "test_hotel.py").read_text() == "mine"
    assert len(list(here.iterdir())) == 1


# -- the command


def test_the_next_two_commands_are_printed_and_the_environment_is_ready(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env_init("my_task")
    commands = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  aitrain ")]
    assert [command[:2] for command in commands] == [["aitrain", "env"], ["aitrain", "grpo"]]
    assert "class MyTask" in (here / "my_task.py").read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(here)]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    with pytest.raises(ConfigError, match="--judge: give it alone"):
        env_init("more", judge=True, tools=True)
