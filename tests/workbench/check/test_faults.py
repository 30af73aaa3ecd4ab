"""Planted faults in tests/environments/faulty: each is found by its own check, and healthy ones pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aitrain import TrainConfig
from aitrain.workbench.check.finding import EnvFinding
from aitrain.workbench.check.registry import CHECKS, run_checks
from aitrain.workbench.check.repetition import unseeded_generators
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.opening import open_environment

FOLDER = Path(__file__).parents[2] / "environments" / "faulty"
IN_PROCESSES = ("repeatable-dataset", "two-ranks")

FAULTS: list[tuple[str, str, str]] = [
    ("datasets_of.LastWordOfAssistant", "dataset", ""),
    ("datasets_of.FewPrompts", "duplicates", ""),
    ("datasets_of.TrainedOnHeldOut", "duplicates", ""),
    ("datasets_of.AnswerInPrompt", "leaked-answer", "lazy-policy"),
    ("datasets_of.OrderOfASet", "repeatable-dataset", ""),
    ("datasets_of.KeyOfTheProcess", "two-ranks", "repeatable-dataset"),
    (
        "scores_of.Noise",
        "repeatable-score",
        "concurrency equivalent-forms message-forms side-effects",
    ),
    ("scores_of.Percent", "score-range", "reference"),
    ("scores_of.RaisesOnWords", "exceptions", ""),
    ("scores_of.ShortIsGood", "floor", "lazy-policy"),
    ("scores_of.AnyNumber", "wrong-answer", "other-answer lazy-policy"),
    ("scores_of.Truthy", "other-answer", "floor wrong-answer shotgun denied-answer lazy-policy"),
    ("scores_of.Contains", "shotgun", "denied-answer wrong-answer"),
    ("scores_of.FirstNumberAfterMark", "denied-answer", "wrong-answer shotgun"),
    ("scores_of.WorstFirst", "group-score", ""),
    ("scores_of.PaidFormat", "template", "floor"),
    ("scores_of.MostlyYes", "lazy-policy", ""),
    ("scores_of.WrongReference", "reference", ""),
    ("scores_of.NoStrip", "equivalent-forms", ""),
    ("scores_of.ComparesMessages", "message-forms", "reference"),
    ("scores_of.Generates", "model-use", ""),
    ("scores_of.GullibleJudge", "injection", ""),
    ("scores_of.FlatteredJudge", "tone", ""),
    ("episodes_of.Unseeded", "repeatable-episode", "side-effects"),
    ("episodes_of.Endless", "episode-end", ""),
    ("episodes_of.Crosstalk", "isolation", ""),
    ("episodes_of.OneFileForAll", "concurrency", ""),
    ("episodes_of.ToolRaises", "tools", ""),
    ("processes_of.ChangesDirectory", "side-effects", ""),
    ("processes_of.SetsVariables", "side-effects", ""),
    ("processes_of.SetsGlobalSeed", "side-effects", ""),
    ("processes_of.LeavesThreads", "side-effects", ""),
    ("processes_of.LeavesProcesses", "side-effects", ""),
    ("processes_of.AsksSomebody", "network", ""),
    ("processes_of.AlarmCaught", "signals", ""),
    ("processes_of.LockInTheRow", "pickling", ""),
    ("processes_of.LockOfTheDataset", "pickling", ""),
    ("processes_of.SlowScore", "latency", ""),
]
"""A fault, the check that finds it, and others that it also concerns."""

HEALTHY = [
    "sums.Sums",
    "datasets_of.ChoicesInPrompt",
    "datasets_of.NoneOfThese",
    "episodes_of.TwoTurns",
    "episodes_of.ToolAnswers",
    "processes_of.NoneOfThese",
    "scores_of.InTags",
    "scores_of.Marked",
]
"""What is close to a fault, and none."""


def found(name: str, in_processes: bool) -> Iterator[EnvFinding]:
    """All findings about an environment, and none of a check that failed itself."""
    module, _, class_name = name.partition(".")
    config = TrainConfig(rl_env=f"{FOLDER / module}.py:{class_name}", rl_env_timeout=1.0)
    with unseeded_generators() as unseeded:
        opened, config = open_environment(config)
        with closing(Subject(opened, config, unseeded=unseeded)) as subject:
            checks = [check for check in CHECKS if in_processes or check.name not in IN_PROCESSES]
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


@pytest.mark.parametrize(("fault", "check", "related"), FAULTS, ids=[fault[0] for fault in FAULTS])
@pytest.mark.slow
def test_a_fault_is_found_by_its_own_check_and_by_nothing_unrelated(fault: str, check: str, related: str) -> None:
    serious = [finding for finding in found(fault, check in IN_PROCESSES) if finding.level != "info"]
    assert {check} <= {finding.check for finding in serious} <= {check, *related.split()}, serious


@pytest.mark.parametrize("healthy", HEALTHY)
@pytest.mark.slow
def test_a_healthy_environment_passes(healthy: str) -> None:
    assert [finding for finding in found(healthy, healthy == "sums.Sums") if finding.level != "info"] == []


def test_each_check_finds_a_fault() -> None:
    assert {check for _, check, _ in FAULTS} >= {check.name for check in CHECKS}
