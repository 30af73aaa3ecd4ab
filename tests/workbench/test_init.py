"""`aitrain env init`: five templates, each of which is tested, checked and trained as it is written."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aitrain import TrainConfig, train
from aitrain.cli.env_init import env_init
from aitrain.errors import ConfigError
from aitrain.workbench.check.registry import CHECKS, run_checks
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.init import KINDS, class_name, write_environment
from aitrain.workbench.opening import open_environment

IN_PROCESSES = ("repeatable-dataset", "two-ranks")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment of each kind; its name has a space."""
    folder = tmp_path_factory.mktemp("my envs")
    for kind in KINDS:
        write_environment(f"of_{kind}", kind, folder)
    return folder


def load(file: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)()


@pytest.mark.slow
def test_the_tests_of_all_templates_pass(written: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(written)]
    done = subprocess.run(command, cwd=written, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(".") >= 4 * len(KINDS)


def test_what_is_written_is_tidy_and_names_the_environment_throughout(written: Path) -> None:
    ruff = [sys.executable, "-m", "ruff"]
    for command in ("check", "format --check"):
        options = ["--isolated", "--line-length", "100", str(written)]
        done = subprocess.run([*ruff, *command.split(), *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    for file in written.glob("*.py"):
        text = file.read_text()
        assert "my_environment" not in text
        assert "MyEnvironment" not in text


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_template_trains_on_the_tiny_model_as_it_is(
    written: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = load(written / f"of_{kind}.py", class_name(f"of_{kind}"))
    config = TrainConfig(
        model="tiny", max_steps=1, rl_prompts_per_step=2, rl_num_generations=4, batch_size=8, eval_cases=4,
        rl_max_new_tokens=4, rl_kl_coef=0.0,
    )  # fmt: skip
    result = train(config, environment=environment)
    assert result.status == "finished"
    assert [line["reward"] for line in result.history if "reward" in line]


# -- names


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("json", "my_json"),
        ("random", "my_random"),
        ("test", "my_task"),
        ("sys", "my_sys"),
        ("torch", "my_torch"),
        ("aitrain", "my_aitrain"),
        ("envs", "my_envs"),
        ("conftest", "my_conftest"),
        ("my-task", "my_task"),
        ("My Task!", "my_task"),
        ("folder/hotel", "hotel"),
        ("hotel.py", "hotel"),
        ("2048", "task_2048"),
        ("class", "my_class"),
        ("test_hotel", "hotel"),
        ("hotel_test", "hotel"),
        ("_hotel", "hotel"),
        ("", "task"),
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


@pytest.mark.parametrize("existing", ["hotel.py", "test_hotel.py", "hotel/__init__.py"])
def test_existing_files_are_left_as_they_are(here: Path, existing: str) -> None:
    (here / existing).parent.mkdir(exist_ok=True)
    (here / existing).write_text("mine")
    with pytest.raises(ConfigError, match="is left as it is"):
        write_environment("hotel", "plain", here)
    assert (here / existing).read_text() == "mine"
    assert len(list(here.rglob("*.py"))) == 1


def test_a_folder_that_cannot_be_written_is_named(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*hotel\.py"):
        write_environment("hotel", "plain", here / "missing")


def test_class_names_follow_the_name() -> None:
    assert [class_name(name) for name in ("hotel", "hotel_booking", "hotel2", "MyTask", "größe")] == [
        "Hotel", "HotelBooking", "Hotel2", "MyTask", "Größe",
    ]  # fmt: skip


# -- the command


@pytest.fixture
def printed(here: Path, capsys: pytest.CaptureFixture[str]) -> str:
    env_init("my_task")
    return capsys.readouterr().out


def test_the_next_two_commands_are_printed_and_fit_80_columns(
    here: Path, printed: str, preloaded_aitrain: Path
) -> None:
    commands = [line for line in printed.splitlines() if line.startswith("  aitrain ")]
    assert [command.split()[:2] for command in commands] == [["aitrain", "env"], ["aitrain", "grpo"]]
    assert max(map(len, printed.splitlines())) <= 80
    path = f"{preloaded_aitrain}{os.pathsep}{os.environ['PATH']}"
    script = printed.partition("\n")[2].replace("--max-steps 20", "--max-steps 20 --dry-run").partition("aitrain grpo")
    done = subprocess.run(
        ["bash", "-euc", script[1] + script[2]],
        cwd=here, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_tools_and_several_turns_go_together_and_a_judge_does_not(here: Path) -> None:
    env_init("talk", multi_turn=True)
    env_init("calculator", tools=True)
    env_init("both", tools=True, multi_turn=True)
    env_init("judged", judge=True)
    kinds = {"talk": "def episode", "calculator": "def score_episode", "both": "def start", "judged": "ask_judge"}
    for name, method in kinds.items():
        assert method in (here / f"{name}.py").read_text()
    with pytest.raises(ConfigError, match="--judge: give it alone"):
        env_init("more", judge=True, tools=True)
