"""Batches that are played while another one trains: their places, versions, and resumed runs."""

from __future__ import annotations

import subprocess

import pytest

from aitrain.runs.rollout_record import read_rollouts
from aitrain.runs.run_folder import RunFolder
from tests.training.small_server import SmallServer
from tests.training.test_processes import Command, command
from tests.training.test_resume import as_if_killed_after
from tests.training.test_served_run import server

__all__ = ["command", "server"]  # fixtures


def trained(folder: RunFolder) -> tuple[set[tuple[int, int]], list[tuple[int, int | None, object]]]:
    """Step and weight version of all episodes in training, and step, group and case of each."""
    files = sorted(folder.rollouts.glob("*.jsonl"))
    records = [record for file in files for record in read_rollouts(file) if not record.eval_phase]
    assert all(turn.weight_version == record.weight_version for record in records for turn in record.turns)
    cases = sorted((record.step, record.group, record.case_idx) for record in records)
    return {(record.step, record.weight_version) for record in records}, cases


@pytest.mark.parametrize(("processes", "updates"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_a_run_that_samples_ahead_and_is_killed_trains_on_the_same_cases(
    processes: int, updates: int, command: Command, server: SmallServer
) -> None:
    """Each batch has the weights from before the step that trains beside it, also where held-out cases are scored and a
    checkpoint is written meanwhile. The batch that was played ahead is sampled again, with the weights of the
    checkpoint, which may lie between two steps on one batch."""
    done = command.run(
        "Slow", "--use-vllm", "--vllm-mode=server", f"--vllm-server-url={server.url}", "--rl-ahead=1",
        f"--num-processes={processes}", f"--rl-updates-per-rollout={updates}", f"--max-steps={4 * updates}", "--peft",
        "--lora-dropout=0.2", "--save-strategy=steps", "--save-steps=1", "--save-total-limit=9",
        "--eval-strategy=steps", "--eval-steps=2", "--rl-max-episode-tokens=300",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = RunFolder(command.folder / "run")
    versions, cases = trained(whole)
    assert versions == {(1 + updates * batch, updates * max(0, batch - 1)) for batch in range(4)}

    kill = 3 if updates == 2 else 2
    killed = as_if_killed_after(whole.path, kill, "killed")
    resume = [*command.aitrain, "grpo", "--config", str(killed / "config.yaml"), "--resume"]
    subprocess.run(resume, cwd=command.folder, stdout=subprocess.DEVNULL, check=True)
    again, same_cases = trained(RunFolder(killed))
    assert same_cases == cases
    assert again == {(step, kill if step == 1 + 2 * updates else version) for step, version in versions}
