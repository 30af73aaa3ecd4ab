"""docs/examples: the files for clusters; that aitrain takes their commands is held by test_printed_commands.py."""

from __future__ import annotations

from pathlib import Path

import yaml

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SBATCH = (EXAMPLES / "train.sbatch").read_text(encoding="utf-8")
SERVICE, JOB = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text(encoding="utf-8"))
POD = JOB["spec"]["template"]["spec"]
TASK = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text(encoding="utf-8"))
SCRIPTS = [SBATCH, POD["containers"][0]["args"][0], TASK["run"]]


def test_a_job_is_warned_before_its_time_limit_its_machines_find_each_other_and_its_token_is_a_secret() -> None:
    assert {"#SBATCH --ntasks-per-node=1", "#SBATCH --signal=TERM@120"} <= set(SBATCH.splitlines())
    assert SERVICE["spec"]["selector"] == {"job-name": JOB["metadata"]["name"]}
    assert POD["subdomain"] == SERVICE["metadata"]["name"]
    (token,) = POD["containers"][0]["env"]
    assert (token["name"], "secretKeyRef" in token["valueFrom"]) == ("AITRAIN_TOKEN", True)
    assert TASK["secrets"] == {"AITRAIN_TOKEN": None}
    for script in SCRIPTS:
        assert "aitrain grpo --resume" in script  # a job that is started again continues from its checkpoint
