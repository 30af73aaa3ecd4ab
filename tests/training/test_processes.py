"""Real processes: two ranks, signals, a parent that dies, a child that dies, resuming."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aitrain.runs.heartbeat import BEAT
from aitrain.runs.run_folder import LOCK, lock_file, read_lines, read_object
from aitrain.runs.run_list import look
from tests.training.conftest import difference

ENVIRONMENTS = Path(__file__).parents[1] / "environments" / "processes.py"
FLAGS = ["--rl-max-new-tokens=4", "--rl-kl-coef=0", "--lr=1e-3", "--project-name=run", "--output-dir=."]


class Command:
    """`aitrain grpo` on the small model, in a folder of its own."""

    def __init__(self, model: Path, folder: Path, *aitrain: str) -> None:
        self.model, self.folder, self.aitrain = model, folder, aitrain or (sys.executable, "-m", "aitrain")

    def start(self, environment: str, *flags: str) -> subprocess.Popen[str]:
        has_other = any(flag.partition("=")[0] == "--rl-env" for flag in flags)  # a second one would be played as well
        place = [] if has_other else ["--rl-env", f"{ENVIRONMENTS}:{environment}"]
        named = ["--model", str(self.model), *place, *FLAGS, *flags]
        return subprocess.Popen(
            [*self.aitrain, "grpo", *named],
            cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, environment: str, *flags: str) -> subprocess.CompletedProcess[str]:
        process = self.start(environment, *flags)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def records(self, run: str = "run") -> list[dict[str, Any]]:
        records = [r for file in (self.folder / run / "rollouts").glob("*.jsonl") for r in read_lines(file)]
        return [record for record in records if "eval_phase" not in record]

    def wait_until(self, is_so: Callable[[], object], process: subprocess.Popen[str]) -> None:
        """Wait until something is so, while the process runs; fails after 240 s."""
        deadline = time.monotonic() + 240
        while not is_so():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def wait_for_step(self, step: int, process: subprocess.Popen[str]) -> None:
        metrics = self.folder / "run" / "metrics.jsonl"
        self.wait_until(lambda: any(line["step"] >= step for line in read_lines(metrics)), process)


@pytest.fixture
def command(small_model: Path, tmp_path: Path, preloaded_aitrain: Path) -> Iterator[Command]:
    yield Command(small_model, tmp_path, str(preloaded_aitrain / "aitrain"))
    assert workers_in(tmp_path) == []


def workers_in(folder: Path) -> list[int]:
    """Ids of the training processes whose working directory is the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            names = (process / "cmdline").read_bytes() + (process / "comm").read_bytes()
            if b"aitrain.jobs.worker"[-15:] in names and (process / "cwd").resolve() == folder.resolve():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_two_processes_train_on_the_rows_that_the_first_one_built(command: Command) -> None:
    notes = json.dumps({"notes": str(command.folder)})
    samples = ["--eval-cases=3", "--eval-samples=3"]
    done = command.run("Shared", "--num-processes=2", "--max-steps=2", f"--rl-env-config={notes}", *samples)

    assert done.returncode == 0, done.stderr
    assert len(list(command.folder.glob("built-by-*"))) == 1
    assert len(list((command.folder / "run" / "rollouts").iterdir())) == 2
    assert all(record["metrics"]["same"] == 1.0 for record in command.records())
    groups = {(record["step"], record["group"]) for record in command.records()}
    assert groups == {(step, group) for step in (1, 2) for group in range(4)}
    for group in groups:
        members = [r for r in command.records() if (r["step"], r["group"]) == group]
        assert len(members) == 4
        assert len({member["prompt"] for member in members}) == 1
    check_means_over_episodes(command)
    check_samples_of_held_out_cases(command)


def check_means_over_episodes(command: Command) -> None:
    """One process has `some` in every episode, and the other one in few: the mean is that of all these episodes."""
    for line in read_lines(command.folder / "run" / "metrics.jsonl"):
        values = [
            r["metrics"]["some"] for r in command.records() if r["step"] == line["step"] and "some" in r["metrics"]
        ]
        assert len(values) != 16
        assert line["env/some"] == pytest.approx(sum(values) / len(values))


def check_samples_of_held_out_cases(command: Command) -> None:
    """Each of the nine is played once, on whichever process, and all of them make the score."""
    files = (command.folder / "run" / "rollouts").glob("*.jsonl")
    played = [r for file in files for r in read_lines(file) if r.get("eval_phase") == "after_sampled"]
    assert len({(r["row_number"], r["sample"]) for r in played}) == len(played) == 9
    result = read_object(command.folder / "run" / "result.json")
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
    _out, err = running.communicate(timeout=120)

    assert running.returncode == 130, err
    assert "--config run/config.yaml --resume" in err
    status = json.loads((command.folder / "run" / "status.json").read_text())
    assert status["status"] == "stopped"
    assert (command.folder / "run" / "checkpoints" / f"checkpoint-{status['step']}" / "trainer_state.json").exists()
    assert (command.folder / "run" / "model" / "model.safetensors").exists()


def test_a_stopped_run_that_is_resumed_ends_like_one_that_was_not(command: Command) -> None:
    whole = command.run("Slow", "--max-steps=12", "--project-name=whole")
    running = command.start("Slow", "--max-steps=12")
    command.wait_for_step(3, running)
    running.send_signal(signal.SIGTERM)
    stopped = running.communicate(timeout=120)
    resume = [*command.aitrain, "grpo", "--config", "run/config.yaml", "--resume-from-checkpoint=auto"]
    resumed = subprocess.run(resume, cwd=command.folder, capture_output=True, text=True, check=False)

    assert whole.returncode == 0, whole.stderr
    assert running.returncode == 130, stopped
    assert resumed.returncode == 0, resumed.stderr
    assert difference(command.folder / "run" / "model", command.folder / "whole" / "model") == 0.0
    lines = {run: list(read_lines(command.folder / run / "metrics.jsonl")) for run in ("run", "whole")}
    assert [line["step"] for line in lines["run"]] == [line["step"] for line in lines["whole"]]
    assert [line["reward"] for line in lines["run"]] == [line["reward"] for line in lines["whole"]]
    assert [r["completion"] for r in command.records()] == [r["completion"] for r in command.records("whole")]
    results = [json.loads((command.folder / run / "result.json").read_text()) for run in ("run", "whole")]
    assert results[0]["score_before"] == results[1]["score_before"]
    assert results[0]["score_after"] == results[1]["score_after"]


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

    deadline = time.monotonic() + 60
    while workers_in(command.folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert workers_in(command.folder) == []
    assert json.loads((command.folder / "run" / "result.json").read_text())["status"] == "stopped"


@pytest.mark.slow
def test_processes_that_learn_nothing_stop_together_and_that_is_no_failure(command: Command) -> None:
    done = command.run("Level", "--num-processes=2", "--max-steps=50", "--stop-when-flat=3")

    assert done.returncode == 0, done.stderr
    assert "stopped after step 3 and saved: in 3 steps no group's scores differed" in done.stderr
    assert "--config run/config.yaml --resume" in done.stderr
    assert json.loads((command.folder / "run" / "status.json").read_text())["status"] == "stopped"


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_training_process_that_is_killed_ends_the_run_with_its_name(processes: int, command: Command) -> None:
    done = command.run("Unkind", f"--num-processes={processes}", "--rl-prompts-per-step=16")

    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "run folder: " in done.stderr
    who = "The training process" if processes == 1 else "Rank [01] of 2"
    assert re.search(rf"{who} ended without an error message: SIGKILL \(out of memory\?\)", done.stderr)
    assert (command.folder / "run" / "train.log").exists()
    assert json.loads((command.folder / "run" / "status.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_process_that_is_out_of_memory_ends_the_others_and_says_so_itself(command: Command) -> None:
    done = command.run("Hungry", "--num-processes=2", "--max-steps=3")

    assert done.returncode == 1
    assert "Out of memory in step 2" in done.stderr
    assert "--batch-size" in done.stderr


@pytest.mark.slow
def test_a_run_gives_signs_of_life_during_a_long_step_and_is_told_from_a_dead_one(command: Command) -> None:
    running = command.start("Still", "--num-processes=2", "--max-steps=3", "--rl-env-timeout=900")
    run = command.folder / "run"
    command.wait_until(lambda: {"pids", "steps"} <= read_object(run / "status.json").keys(), running)
    first = read_object(run / "status.json")["heartbeat"]
    command.wait_until(lambda: read_object(run / "status.json")["heartbeat"] >= first + 3 * BEAT, running)
    status = read_object(run / "status.json")
    assert (status["status"], status["step"], status["steps"]) == ("running", 0, 3)
    assert len(set(status["pids"])) == 2
    assert set(status["pids"]) == set(workers_in(command.folder))
    assert status["pid"] == status["pids"][0]
    assert look(run).status == "running"

    for pid in (running.pid, *workers_in(command.folder)):
        os.kill(pid, signal.SIGKILL)
    running.communicate()
    assert read_object(run / "status.json")["status"] == "running"
    deadline = time.monotonic() + 60
    while look(run).status == "running" and time.monotonic() < deadline:  # one that ends has no command line already
        time.sleep(0.1)
    assert look(run).status == "dead"


@pytest.mark.slow
def test_a_process_that_hangs_ends_all_of_them_and_is_told_of(command: Command) -> None:
    running = command.start("Slow", "--num-processes=2", "--max-steps=2000", "--ddp-timeout=10", "--eval-cases=0")
    command.wait_for_step(2, running)
    status = command.folder / "run" / "status.json"
    command.wait_until(lambda: "pids" in read_object(status), running)  # in the next heartbeat
    second = read_object(status)["pids"][1]
    os.kill(second, signal.SIGSTOP)
    _, err = running.communicate(timeout=200)

    assert running.returncode == 1, err
    assert "Rank 0 timed out after 10 seconds waiting for another rank (--ddp-timeout)" in err
    assert len(err.partition("aitrain: ")[2].splitlines()) < 8
    assert status_of(second) is None


@pytest.mark.slow
def test_a_process_that_holds_the_gil_for_ever_is_named_and_nothing_is_left(command: Command) -> None:
    done = command.run("Stuck", "--num-processes=2", "--stall-timeout=15", "--rl-env-isolation=process")

    assert done.returncode == 1, done.stderr
    assert re.search(r"aitrain: The run stalled: no progress for \d+ seconds \(--stall-timeout\)\.", done.stderr)
    assert "It hangs in: building the dataset, rank 0 of 2. run/train.log has the stacks" in done.stderr
    assert "aitrain grpo --config run/config.yaml" in done.stderr
    assert len(done.stderr.partition("aitrain: ")[2].splitlines()) < 8
    log = (command.folder / "run" / "train.log").read_text()
    assert "in build_dataset" in log
    assert "torch/distributed/distributed_c10d.py" in log
    assert look(command.folder / "run").status == "stalled"


def status_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None


@pytest.mark.slow
def test_two_processes_that_are_killed_twice_end_like_two_that_were_not(preloaded_aitrain: Path) -> None:
    """The small form of the benchmark, which kills a run fifty times."""
    python = str(preloaded_aitrain / "preloaded-python")
    torture = [python, "-P", "-m", "benchmarks", "torture", "--kills", "2", "--processes", "2"]
    done = subprocess.run(torture, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "differences after 2 kills" in done.stdout


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_run_at_once(command: Command) -> None:
    running = command.start("Slow", "--max-steps=500", "--rl-prompts-per-step=64", "--batch-size=256", "--json")
    command.wait_until(lambda: (command.folder / "run" / "rollouts").exists(), running)
    running.send_signal(signal.SIGINT)
    assert running.stdout is not None
    while "Ctrl-C again" not in (said := running.stdout.readline()):
        assert said
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)

    assert running.returncode == 130
    assert not (command.folder / "run" / "result.json").exists()


@pytest.mark.parametrize("seconds", [0.0, *(pytest.param(later, marks=pytest.mark.slow) for later in (0.02, 0.3))])
def test_ctrl_c_before_the_first_step_leaves_nothing_behind(seconds: float, command: Command) -> None:
    running = command.start("Slow")
    while not (command.folder / "run").exists():
        assert running.poll() is None, running.communicate()
        time.sleep(0.0005)
    time.sleep(seconds)  # before, while and after the training process is started
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)

    assert running.returncode == 130, err
    assert "Traceback" not in err
    assert os.listdir(command.folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_ctrl_c_before_an_eval_has_processes_leaves_nothing_behind(seconds: float, command: Command) -> None:
    flags = ["--rl-env", f"{ENVIRONMENTS}:Slow", "--output-dir", ".", "--project-name", "run", "--cases", "2"]
    running = subprocess.Popen(
        [*command.aitrain, "eval", str(command.model), *flags],
        cwd=command.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    while not (command.folder / "run").exists():
        assert running.poll() is None, running.communicate()
        time.sleep(0.0005)
    time.sleep(seconds)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)

    assert running.returncode == 130, err
    assert "Traceback" not in err
    assert os.listdir(command.folder) == []
