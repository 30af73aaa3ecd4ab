"""Real processes: two ranks, signals, a parent that dies, a child that dies, resuming, ranks of torchrun and mpirun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aitrain.launch import launched_ranks
from aitrain.runs.new_folder import LOCK, lock_file
from aitrain.runs.run_folder import read_object
from aitrain.ui.overview import Overview
from tests.conftest import episodes_of, free_port, processes_in, read_lines, run_in_process
from tests.execution.waiting import eventually
from tests.training.test_resume import assert_same

ENVIRONMENTS = Path(__file__).parents[1] / "environments" / "processes.py"
FLAGS = ["--rl-max-new-tokens=4", "--rl-kl-coef=0", "--lr=1e-3", "--project-name=run", "--output-dir=."]


class Command:
    """`aitrain grpo` on the small model, in a folder of its own."""

    def __init__(self, model: Path, folder: Path, *aitrain: str) -> None:
        self.model, self.folder, self.aitrain = model, folder, aitrain

    def start(self, environment: str, *flags: str, **variables: str) -> subprocess.Popen[str]:
        named = ["--model", str(self.model), "--rl-env", f"{ENVIRONMENTS}:{environment}", *FLAGS, *flags]
        return subprocess.Popen(
            [*self.aitrain, "grpo", *named],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, **variables},
        )  # fmt: skip

    def run(self, environment: str, *flags: str) -> subprocess.CompletedProcess[str]:
        process = self.start(environment, *flags)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def wait_until(self, is_so: Callable[[], object], process: subprocess.Popen[str]) -> None:
        """Wait until something is so, while the process runs; fails after 240 s."""
        assert eventually(lambda: is_so() or process.poll() is not None, 240)
        assert process.poll() is None, process.communicate()

    def wait_for_step(self, step: int, process: subprocess.Popen[str]) -> None:
        metrics = self.folder / "run" / "metrics.jsonl"
        self.wait_until(lambda: any(line["step"] >= step for line in read_lines(metrics)), process)


@pytest.fixture
def command(small_model: Path, tmp_path: Path, preloaded_aitrain: Path) -> Iterator[Command]:
    yield Command(small_model, tmp_path, str(preloaded_aitrain / "aitrain"))
    assert workers_in(tmp_path) == []


def workers_in(folder: Path) -> list[int]:
    """Ids of the training processes whose working directory is the folder."""
    return processes_in(folder, "aitrain.jobs.worker"[-15:])


def test_two_processes_train_on_the_rows_that_the_first_one_built(command: Command) -> None:
    notes = "--rl-env-config=" + json.dumps({"notes": str(command.folder)})
    # the checks of an environment, which are off here, build them in a process of their own
    more = [notes, "--no-rl-check", "--eval-cases=3", "--eval-samples=3"]
    more.append(f"--custom-callbacks={ENVIRONMENTS}:stops_on_one")
    done = command.run("Shared", "--num-processes=2", "--max-steps=4", "--save-total-limit=3", *more)

    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(command.folder / "run" / "checkpoints")) == [f"checkpoint-{step}" for step in (1, 2, 3)]
    run = command.folder / "run"
    records = episodes_of(run)
    assert len(list(command.folder.glob("built-by-*"))) == 1
    assert read_object(run / "environment.json")["processes"] == 2
    assert all(record["metrics"]["same"] == 1.0 for record in records)
    # one process has `some` in every episode, and the other one in few: the mean is that of all these episodes
    for line in read_lines(run / "metrics.jsonl"):
        values = [r["metrics"]["some"] for r in records if r["step"] == line["step"] and "some" in r["metrics"]]
        assert len(values) != 16
        assert line["env/some"] == pytest.approx(sum(values) / len(values))

    # each sample of a held-out case is played once, on whichever process, and all of them make the score
    played = episodes_of(run, "after_sampled")
    assert len({(r["row_number"], r["sample"]) for r in played}) == len(played) == 9
    result = read_object(run / "result.json")
    assert result["score_after"] == pytest.approx(sum(r["score"] for r in played) / 9)
    assert result["scores"]["sampled"]["after"]["count"] == 3


@pytest.mark.parametrize(
    ("number", "processes"), [(signal.SIGINT, 1), pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow)]
)
def test_a_signal_ends_all_processes_saves_and_says_how_to_resume(
    number: signal.Signals, processes: int, command: Command
) -> None:
    running = command.start("Slow", f"--num-processes={processes}", "--max-steps=500", "--save-strategy=no")
    command.wait_for_step(2, running)
    running.send_signal(number)
    _out, err = running.communicate(timeout=240)

    assert running.returncode == 130, err
    assert "--config run/config.yaml --resume" in err
    run, status = command.folder / "run", read_object(command.folder / "run" / "status.json")
    assert status["status"] == "stopped"
    assert (run / "model" / "model.safetensors").exists()
    last = str(status["step"] + 1)
    resume = [*command.aitrain, "grpo", "--config", "run/config.yaml", "--resume", "--max-steps", last]
    resumed = subprocess.run(resume, cwd=command.folder, capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    steps = [line["step"] for line in read_lines(run / "metrics.jsonl") if "reward" in line]
    assert steps == list(range(1, status["step"] + 2))


def test_training_stops_and_saves_when_its_parent_is_killed_and_has_the_folder_until_then(command: Command) -> None:
    running = command.start("Slow", "--max-steps=500")
    command.wait_for_step(2, running)
    (worker,) = workers_in(command.folder)
    os.kill(worker, signal.SIGSTOP)
    running.kill()
    running.communicate()
    with (command.folder / "run" / LOCK).open() as file:
        assert lock_file(file.fileno()) is False
    os.kill(worker, signal.SIGCONT)

    assert eventually(lambda: not workers_in(command.folder), 240)
    assert read_object(command.folder / "run" / "result.json")["status"] == "stopped"


def test_a_training_process_that_is_killed_ends_the_run_with_its_name(command: Command) -> None:
    done = command.run("Unkind", "--num-processes=2", "--rl-prompts-per-step=16")

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "run folder: " in done.stderr
    assert "of 2 ended without an error message: SIGKILL" in done.stderr
    assert (command.folder / "run" / "train.log").exists()
    assert read_object(command.folder / "run" / "status.json")["status"] == "failed"


@pytest.mark.slow
def test_a_process_that_hangs_ends_all_of_them_and_is_told_of(command: Command) -> None:
    running = command.start("Slow", "--num-processes=2", "--max-steps=2000", "--ddp-timeout=10", "--eval-cases=0")
    command.wait_for_step(2, running)
    os.kill(workers_in(command.folder)[1], signal.SIGSTOP)
    _, err = running.communicate(timeout=240)

    assert running.returncode == 1, err
    assert "(--ddp-timeout)" in err
    assert Overview(command.folder / "run").status == "failed"


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_run_at_once(command: Command) -> None:
    running = command.start("Slow", "--max-steps=500", "--rl-prompts-per-step=64", "--batch-size=256", "--json")
    command.wait_until(lambda: (command.folder / "run" / "rollouts").exists(), running)
    running.send_signal(signal.SIGINT)
    assert running.stdout is not None
    while "Ctrl-C again" not in (said := running.stdout.readline()):
        assert said
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=240)

    assert running.returncode == 130
    assert not (command.folder / "run" / "result.json").exists()


INTERRUPTED_START = """
import signal, sys
from aitrain.cli import main
from aitrain.launch import processes

class Interrupted(processes.ProcessTree):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        signal.raise_signal(signal.SIGINT)

processes.ProcessTree = Interrupted
sys.exit(main._run())
"""


def test_ctrl_c_while_the_processes_are_started_leaves_nothing_behind(command: Command) -> None:
    command.aitrain = (sys.executable, "-c", INTERRUPTED_START)
    done = command.run("Slow", "--max-steps=500")

    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(command.folder) == []


# -- processes that another program starts


Torchrun = Callable[..., Command]
TRAIN = ["--eval-cases=0", "--save-strategy=steps", "--save-steps=1"]


@pytest.fixture
def torchrun(small_model: Path, folder: Path, preloaded_aitrain: Path) -> Torchrun:
    """`aitrain` on two ranks of torchrun, which gets these flags."""
    python = str(preloaded_aitrain / "preloaded-python")
    place = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    launcher = [python, "-P", "-m", "torch.distributed.run", "--nproc-per-node=2", *place]
    return lambda *flags: Command(small_model, folder, *launcher, *flags, "-m", "aitrain")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert eventually(lambda: not processes_in(tmp_path), 60)


@pytest.mark.slow
def test_two_processes_of_torchrun_end_with_the_weights_of_num_processes_2_though_one_was_killed(
    small_model: Path, folder: Path, torchrun: Torchrun, preloaded_aitrain: Path
) -> None:
    own = folder / "own"
    own.mkdir()
    more = [*TRAIN, "--max-steps=6", "--save-total-limit=9", "--peft", "--lora-r=4", "--lora-dropout=0.3"]
    done = Command(small_model, own, str(preloaded_aitrain / "aitrain")).run("Slow", *more, "--num-processes=2")
    assert done.returncode == 0, done.stderr

    command = torchrun("--max-restarts=1")
    running = command.start("Slow", *more)
    command.wait_for_step(2, running)
    os.kill(workers_in(folder)[-1], signal.SIGKILL)
    out, err = running.communicate(timeout=300)

    assert running.returncode == 0, err
    assert sorted(path.name for path in folder.iterdir()) == ["own", "run"]
    assert out.count(f"run folder: {folder / 'run'}") == 1
    assert_same(own / "run", folder / "run")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_nothing_survives_a_torchrun_that_is_ended(number: signal.Signals, folder: Path, torchrun: Torchrun) -> None:
    command = torchrun()
    running = command.start("Slow", "--eval-cases=0", "--max-steps=500")
    command.wait_for_step(1, running)
    running.send_signal(number)  # which the preloaded server passes on
    running.communicate(timeout=240)

    assert eventually(lambda: not processes_in(folder), 60)
    assert read_object(folder / "run" / "status.json")["status"] == "stopped"


def test_the_cause_of_a_failure_is_in_torchruns_error_file(folder: Path, torchrun: Torchrun) -> None:
    done = torchrun().run("Wrong")

    assert done.returncode == 1
    # standard output and error: the command waits until the log is closed
    assert "the log is open as 2 files" in done.stderr.partition("Root Cause")[2]
    assert list(folder.iterdir()) == []


def variables(rank: int) -> dict[str, str]:
    """What Open MPI's mpirun sets."""
    numbers = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}


def test_another_command_under_a_launcher_is_refused_once_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        for name, value in variables(rank).items():
            monkeypatch.setenv(name, value)
        if rank == 0:
            code, _, err = run_in_process("doctor")
            assert (code, "Only aitrain grpo runs under torchrun" in err) == (2, True)
        else:
            with pytest.raises(SystemExit, match="2"):
                run_in_process("doctor")


def test_a_launcher_on_a_system_without_proc_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launched_ranks, "PROC", tmp_path / "proc")
    for name, value in variables(0).items():
        monkeypatch.setenv(name, value)

    code, _, err = run_in_process("grpo", "--model", "tiny", "--rl-env", "none.py:Env")

    assert (code, "need /proc" in err) == (2, True)


@pytest.mark.slow
def test_processes_with_mpirun_s_variables_meet_without_a_store_of_their_launcher(
    small_model: Path, folder: Path
) -> None:
    command = Command(small_model, folder, sys.executable, "-m", "aitrain")
    ranks = [command.start("Slow", *TRAIN, "--max-steps=1", **variables(rank)) for rank in (0, 1)]
    ends = [rank.communicate(timeout=240) for rank in ranks]

    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert ends[1] == ("", "")
    assert [path.name for path in folder.iterdir()] == ["run"]
    assert len(list((folder / "run" / "rollouts").iterdir())) == 2
