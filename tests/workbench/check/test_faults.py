"""Planted faults in tests/environments/faulty: each is found by its own check, and healthy ones pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aitrain import TrainConfig
from aitrain.workbench.check.registry import CHECKS, run_checks
from aitrain.workbench.check.subject import EnvFinding, Subject
from aitrain.workbench.opening import open_environment

FOLDER = Path(__file__).parents[2] / "environments" / "faulty"
IN_PROCESS = "repeatable-dataset"
"""A check that takes long."""

FAULTS = {
    "datasets_of.py:LastWordOfAssistant": "dataset",
    "datasets_of.py:FewPrompts": "duplicates",
    "datasets_of.py:TrainedOnHeldOut": "duplicates",
    "datasets_of.py:AnswerInPrompt": "leaked-answer lazy-policy",
    "datasets_of.py:OrderOfASet": "repeatable-dataset",
    "datasets_of.py:KeyOfTheProcess": "repeatable-dataset",
    "scores_of.py:Noise": "repeatable concurrency equivalent-forms side-effects",
    "scores_of.py:Percent": "exceptions reference",
    "scores_of.py:PercentOfColumn": "exceptions",
    "scores_of.py:RaisesOnWords": "exceptions",
    "scores_of.py:ShortIsGood": "floor lazy-policy",
    "scores_of.py:AnyNumber": "wrong-answer other-answer lazy-policy",
    "scores_of.py:Truthy": "other-answer floor wrong-answer shotgun denied-answer lazy-policy",
    "scores_of.py:Contains": "shotgun denied-answer wrong-answer",
    "scores_of.py:FirstNumberAfterMark": "denied-answer wrong-answer shotgun",
    "scores_of.py:WorstFirst": "group-score",
    "scores_of.py:PaidFormat": "floor",
    "scores_of.py:MostlyYes": "lazy-policy",
    "scores_of.py:WrongReference": "reference",
    "scores_of.py:NoStrip": "equivalent-forms",
    "scores_of.py:ComparesMessages": "reference",
    "scores_of.py:Generates": "model-use",
    "scores_of.py:GullibleJudge": "injection",
    "scores_of.py:FlatteredJudge": "injection",
    "scores_of.py:JudgeOfTextAlone": "injection",
    "episodes_of.py:Unseeded": "repeatable side-effects",
    "episodes_of.py:Endless": "episode-end",
    "episodes_of.py:Crosstalk": "concurrency",
    "episodes_of.py:OneFileForAll": "concurrency",
    "episodes_of.py:ToolRaises": "exceptions",
    "episodes_of.py:ToolRemembers": "repeatable exceptions",
    "processes_of.py:ChangesDirectory": "side-effects",
    "processes_of.py:SetsVariables": "side-effects",
    "processes_of.py:SetsGlobalSeed": "side-effects",
    "processes_of.py:LeavesThreads": "side-effects",
    "processes_of.py:HangsOnNothing": "exceptions",
    "processes_of.py:LeavesProcesses": "side-effects",
    "processes_of.py:AsksSomebody": "side-effects",
    "processes_of.py:AlarmCaught": "side-effects",
    "processes_of.py:LockInTheRow": "pickling",
    "processes_of.py:LockOfTheDataset": "pickling",
    "processes_of.py:SlowScore": "latency",
}
"""The check that finds a fault, and others that it also concerns."""

HEALTHY = [
    "sums.py:Sums",
    "datasets_of.py:ChoicesInPrompt",
    "datasets_of.py:NoneOfThese",
    "episodes_of.py:TwoTurns",
    "episodes_of.py:ToolAnswers",
    "processes_of.py:NoneOfThese",
    "scores_of.py:InTags",
    "scores_of.py:Marked",
    "scores_of.py:NothingIsRight",
    "scores_of.py:NumberAtMark",
]
"""What is close to a fault, and none."""


def found(name: str, in_processes: bool) -> Iterator[EnvFinding]:
    """All findings about an environment of the folder, or in another file; no check failed itself."""
    config = TrainConfig(rl_env=f"{FOLDER / name}", rl_env_timeout=1.0)
    opened, config = open_environment(config)
    with closing(Subject(opened, config)) as subject:
        checks = [check for check in CHECKS if in_processes or check.name != IN_PROCESS]
        for result in run_checks(subject, checks):
            assert "itself failed" not in result.skipped, result
            yield from result.findings


@pytest.fixture(autouse=True)
def hash_seed_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh processes have the hash seed of this one, as in training."""
    monkeypatch.setenv("PYTHONHASHSEED", os.environ.get("PYTHONHASHSEED", "random"))


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What faulty environments change in this process is undone."""
    variables = dict(os.environ)
    monkeypatch.chdir(Path.cwd())
    yield
    os.environ.clear()
    os.environ.update(variables)


@pytest.mark.parametrize(("fault", "checks"), FAULTS.items())
@pytest.mark.slow
def test_a_fault_is_found_by_its_own_check_and_by_nothing_unrelated(fault: str, checks: str) -> None:
    own, *related = checks.split()
    serious = [finding for finding in found(fault, own == IN_PROCESS) if finding.level != "info"]
    assert {own} <= {finding.check for finding in serious} <= {own, *related}, serious


@pytest.mark.parametrize("healthy", HEALTHY)
@pytest.mark.slow
def test_a_healthy_environment_passes(healthy: str) -> None:
    assert [finding for finding in found(healthy, healthy == "sums.py:Sums") if finding.level != "info"] == []


def test_each_check_finds_a_fault() -> None:
    assert {checks.split()[0] for checks in FAULTS.values()} >= {check.name for check in CHECKS}
