"""docs/scaling.md: its tables are current, and the files for clusters have commands that aitrain takes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from aitrain.options.reading import resolve
from aitrain.options.train import TrainConfig
from tests.conftest import write

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"

sys.path.insert(0, str(ROOT / "docs"))
import write_scaling_tables  # noqa: E402

MODELS = (*write_scaling_tables.MODELS, *write_scaling_tables.SMALL_MODELS)

KNOWN = {
    "Qwen3-0.6B": 0.596, "Qwen3-1.7B": 1.721, "Qwen3-4B": 4.022, "Qwen3-8B": 8.191, "Qwen3-14B": 14.768,
    "Qwen3-32B": 32.762, "Qwen2.5-72B": 72.706,
    "Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.544, "Qwen2.5-3B": 3.086, "Qwen2.5-7B": 7.616,
}  # fmt: skip
"""Billions of weights, as the models' cards have them."""


@pytest.mark.slow
def test_the_tables_are_those_that_make_docs_writes() -> None:
    for page in write_scaling_tables.TABLES:
        assert write_scaling_tables.with_tables(page) == page.read_text(encoding="utf-8"), page.name


def test_the_models_of_the_tables_have_their_numbers_of_weights() -> None:
    counted = {model.name: model.shape.weights / 1e9 for model in MODELS}

    assert counted == pytest.approx(KNOWN, abs=1e-3)


# -- files for clusters


def sbatch_script() -> str:
    return (EXAMPLES / "train.sbatch").read_text(encoding="utf-8")


def kubernetes() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8")))


def kubernetes_script() -> str:
    (container,) = kubernetes()[1]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["/bin/bash", "-c"]
    return str(container["args"][0])


def skypilot() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text(encoding="utf-8"))
    return loaded


SCRIPTS = {
    "train.sbatch": sbatch_script,
    "kubernetes.yaml": kubernetes_script,
    "skypilot.yaml": lambda: str(skypilot()["run"]),
}
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
    job, *options = arguments_of(SCRIPTS[name](), tmp_path)

    assert options[0] == "--resume"  # a job that is started again continues from its checkpoint
    config = config_of(options[1:])

    assert job == "grpo"
    assert config.model == "Qwen/Qwen3-8B"
    assert config.project_name == "math-8b"
    if name != "train.sbatch":
        assert (config.nnodes, config.node_rank) == (2, 1)
        assert config.master_addr in ("10.0.0.1", "aitrain-0.aitrain")


def test_slurm_starts_one_task_per_node_and_sends_sigterm_before_the_time_limit() -> None:
    lines = [line.removeprefix("#SBATCH ") for line in sbatch_script().splitlines() if line.startswith("#SBATCH ")]
    given = dict(shlex.split(line)[0].partition("=")[::2] for line in lines)

    assert given["--ntasks-per-node"] == "1"
    assert given["--signal"] == "TERM@120"
    assert "srun aitrain grpo" in sbatch_script()


def test_the_pods_of_the_job_find_each_other_by_the_names_of_the_service() -> None:
    service, job = kubernetes()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]

    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert f"--master-addr {job['metadata']['name']}-0.{pod['subdomain']}" in kubernetes_script()
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (token,) = container["env"]
    assert token["name"] == "AITRAIN_TOKEN"
    assert "secretKeyRef" in token["valueFrom"]


def test_skypilot_starts_as_many_nodes_as_the_command_expects_and_keeps_the_token_secret() -> None:
    task = skypilot()

    assert task["num_nodes"] == 2
    assert task["secrets"] == {"AITRAIN_TOKEN": None}


def test_every_cluster_file_says_that_it_was_not_run() -> None:
    assert sorted(file.name for file in EXAMPLES.iterdir()) == sorted(SCRIPTS)
    for file in EXAMPLES.iterdir():
        assert "Not run by us" in file.read_text(encoding="utf-8").splitlines()[0 if file.suffix == ".yaml" else 1]
