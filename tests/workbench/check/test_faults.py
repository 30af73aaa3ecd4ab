"""Planted faults in tests/environments/faulty: each is found by its own check, and its healthy twin passes."""

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

FAULTS: list[tuple[str, str, str, str]] = [
    ("datasets_of.LastWordOfAssistant", "datasets_of.NoneOfThese", "dataset", ""),
    ("datasets_of.SharedCaseIdx", "datasets_of.NoneOfThese", "dataset", ""),
    ("datasets_of.FewPrompts", "datasets_of.NoneOfThese", "duplicates", ""),
    ("datasets_of.TrainedOnHeldOut", "datasets_of.NoneOfThese", "duplicates", ""),
    ("datasets_of.AnswerInPrompt", "datasets_of.ChoicesInPrompt", "leaked-answer", "lazy-policy"),
    ("datasets_of.KeyInSystemPrompt", "datasets_of.ChoicesInSystemPrompt", "leaked-answer", ""),
    ("datasets_of.OrderOfASet", "sums.Sums", "repeatable-dataset", ""),
    ("datasets_of.KeyOfTheProcess", "datasets_of.KeyOfTheRow", "two-ranks", "repeatable-dataset"),
    (
        "scores_of.Noise",
        "scores_of.NoNoise",
        "repeatable-score",
        "concurrency equivalent-forms message-forms side-effects",
    ),
    ("scores_of.Percent", "sums.Sums", "score-range", "reference"),
    ("scores_of.RaisesOnWords", "sums.Sums", "exceptions", ""),
    ("scores_of.HangsOnLongReplies", "sums.Sums", "exceptions", ""),
    ("scores_of.ShortIsGood", "scores_of.RightAndShortIsGood", "floor", "lazy-policy"),
    ("scores_of.AnyNumber", "sums.Sums", "wrong-answer", "other-answer lazy-policy"),
    ("scores_of.Truthy", "sums.Sums", "other-answer", "floor wrong-answer shotgun denied-answer lazy-policy"),
    ("scores_of.Contains", "scores_of.InTags", "shotgun", "denied-answer wrong-answer"),
    ("scores_of.FirstNumberAfterMark", "scores_of.Marked", "denied-answer", "wrong-answer shotgun"),
    ("scores_of.WorstFirst", "scores_of.BestFirst", "group-score", ""),
    ("episodes_of.LastAnswerUnread", "episodes_of.TwoTurns", "wrong-answer", "shotgun"),
    ("scores_of.PaidFormat", "scores_of.SmallFormatBonus", "template", "floor"),
    ("scores_of.MostlyYes", "scores_of.YesAndNo", "lazy-policy", ""),
    ("scores_of.WrongReference", "sums.Sums", "reference", ""),
    ("scores_of.NoStrip", "sums.Sums", "equivalent-forms", ""),
    ("scores_of.ComparesMessages", "scores_of.ReadsMessages", "message-forms", "reference"),
    ("scores_of.Generates", "scores_of.NamesTheModel", "model-use", ""),
    ("scores_of.GullibleJudge", "sums.Sums", "injection", ""),
    ("scores_of.FlatteredJudge", "sums.Sums", "tone", ""),
    ("episodes_of.Unseeded", "episodes_of.Seeded", "repeatable-episode", "side-effects"),
    ("episodes_of.Endless", "episodes_of.Patient", "episode-end", ""),
    ("episodes_of.Crosstalk", "episodes_of.NoCrosstalk", "isolation", ""),
    ("episodes_of.OneFileForAll", "episodes_of.OneFileEach", "concurrency", ""),
    ("episodes_of.ToolRaises", "episodes_of.ToolAnswers", "tools", ""),
    ("episodes_of.ToolUndescribed", "episodes_of.ToolAnswers", "tools", ""),
    ("processes_of.ChangesDirectory", "sums.Sums", "side-effects", ""),
    ("processes_of.SetsVariables", "processes_of.NoneOfThese", "side-effects", ""),
    ("processes_of.SetsGlobalSeed", "processes_of.NoneOfThese", "side-effects", ""),
    ("processes_of.LeavesThreads", "processes_of.NoneOfThese", "side-effects", ""),
    ("processes_of.LeavesProcesses", "processes_of.NoneOfThese", "side-effects", ""),
    ("processes_of.AsksSomebody", "processes_of.NoneOfThese", "network", ""),
    ("processes_of.AlarmCaught", "processes_of.NoneOfThese", "signals", ""),
    ("processes_of.LockInTheRow", "processes_of.NoneOfThese", "pickling", ""),
    ("processes_of.LockOfTheDataset", "processes_of.NoneOfThese", "pickling", ""),
    ("processes_of.SlowScore", "processes_of.WaitsTogether", "latency", ""),
]
"""A fault, its twin, the check that finds the fault, and others that it also concerns."""


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


@pytest.mark.parametrize(
    ("fault", "check", "related"), [(a, c, d) for a, _, c, d in FAULTS], ids=[f[0] for f in FAULTS]
)
@pytest.mark.slow
def test_a_fault_is_found_by_its_own_check_and_by_nothing_unrelated(fault: str, check: str, related: str) -> None:
    serious = [finding for finding in found(fault, check in IN_PROCESSES) if finding.level != "info"]
    assert check in {finding.check for finding in serious}, serious
    unrelated = [finding for finding in serious if finding.check not in {check, *related.split()}]
    assert not unrelated
    own = next(finding for finding in serious if finding.check == check)
    assert own.what and own.why and own.fix  # noqa: PT018


@pytest.mark.parametrize("twin", sorted({twin for _, twin, _, _ in FAULTS}))
@pytest.mark.slow
def test_a_healthy_twin_passes(twin: str) -> None:
    in_processes = any(check in IN_PROCESSES for _, other, check, _ in FAULTS if other == twin)
    assert [finding for finding in found(twin, in_processes) if finding.level != "info"] == []


def test_each_check_finds_a_fault() -> None:
    assert {check for _, _, check, _ in FAULTS} >= {check.name for check in CHECKS}
