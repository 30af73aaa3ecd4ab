"""docs/examples: the files for clusters have commands that aitrain takes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from tests.conftest import write

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SBATCH = (EXAMPLES / "train.sbatch").read_text(encoding="utf-8")
SERVICE, JOB = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
POD = JOB["spec"]["template"]["spec"]
TASK = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text(encoding="utf-8"))
SCRIPTS = {"train.sbatch": SBATCH, "kubernetes.yaml": POD["containers"][0]["args"][0], "skypilot.yaml": TASK["run"]}
VARIABLES = {
    "JOB_COMPLETION_INDEX": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}  # fmt: skip


def arguments_of(script: str, folder: Path) -> list[str]:
    """What the script calls `aitrain` with, in a folder that stands for the shared one."""
    stubs = {"bin/aitrain": 'printf "%s\\n" "$@"\n', "bin/srun": '"$@"\n', ".venv/bin/activate": ""}
    write(folder, {name: f"#!/bin/bash\n{text}" for name, text in stubs.items()})
    for name in stubs:
        (folder / name).chmod(0o755)
    variables = {**os.environ, **VARIABLES, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    variables["SLURM_SUBMIT_DIR"] = str(folder)
    command = ["bash", "-euo", "pipefail", "-c", script.replace("/shared", str(folder))]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def config_of(arguments: list[str]) -> TrainConfig:
    """The options of a command line; each flag must exist, and its value must be accepted."""
    values: dict[str, Any] = {}
    for argument in arguments:
        if argument.startswith("--"):
            values[argument[2:].replace("-", "_")] = True
        else:
            values[list(values)[-1]] = argument
    return resolve(TrainConfig, None, values)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_of_a_cluster_file_is_one_that_aitrain_takes(name: str, tmp_path: Path) -> None:
    job, *options = arguments_of(SCRIPTS[name], tmp_path)

    assert (job, options[0]) == ("grpo", "--resume")  # a job that is started again continues from its checkpoint
    config = config_of(options[1:])
    if name != "train.sbatch":
        assert (config.nnodes, config.node_rank) == (2, 1)
        assert config.master_addr in ("10.0.0.1", "aitrain-0.aitrain")


def test_slurm_starts_one_task_per_node_and_sends_sigterm_before_the_time_limit() -> None:
    assert "#SBATCH --ntasks-per-node=1" in SBATCH
    assert "#SBATCH --signal=TERM@120" in SBATCH


def test_the_pods_of_the_job_find_each_other_by_the_names_of_the_service() -> None:
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    assert (JOB["spec"]["completionMode"], JOB["spec"]["completions"], JOB["spec"]["parallelism"]) == ("Indexed", 2, 2)
    (container,) = POD["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}


def test_every_file_says_that_it_was_not_run() -> None:
    for name in SCRIPTS:
        assert "Not run by us" in (EXAMPLES / name).read_text(encoding="utf-8")
