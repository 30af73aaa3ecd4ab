"""Planted faults in tests/environments/faulty.py: each is found by its own check, and healthy ones pass."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aitrain import TrainConfig
from aitrain.workbench.check.registry import CHECKS, run_check
from aitrain.workbench.check.subject import EnvFinding, Subject
from aitrain.workbench.opening import open_environment

FAULTY = Path(__file__).parents[2] / "environments" / "faulty.py"
ONLY_WHERE_EXPECTED = {"repeatable-dataset": ("OrderOfASet", "KeyOfTheProcess", "Sums"), "latency": ("SlowScore",)}
"""Checks that take long or depend on what else the machine does, and the environments that have them."""

FAULTS = {
    "LastWordOfAssistant": "dataset",
    "FewPrompts": "duplicates",
    "TrainedOnHeldOut": "duplicates",
    "TalkHeldOut": "duplicates",
    "AnswerInPrompt": "leaked-answer lazy-policy",
    "HintOfSystem": "leaked-answer lazy-policy",
    "OpensWithAnswer": "leaked-answer lazy-policy floor",
    "OrderOfASet": "repeatable-dataset",
    "KeyOfTheProcess": "repeatable-dataset",
    "Percent": "exceptions reference",
    "RaisesOnWords": "exceptions",
    "RunsReplies": "exceptions",
    "NoneOfColumn": "floor",
    "SmallLettersOfColumn": "reference",
    "TriesOfColumn": "repeatable",
    "PaysForCalls": "floor",
    "ShortIsGood": "floor lazy-policy",
    "NotANumber": "lazy-policy",
    "AnyNumber": "wrong-answer other-answer lazy-policy",
    "AnyOrder": "wrong-answer",
    "Truthy": "other-answer floor wrong-answer shotgun denied-answer lazy-policy",
    "Contains": "shotgun denied-answer wrong-answer",
    "FirstNumberAfterMark": "denied-answer wrong-answer shotgun",
    "PaidFormat": "floor",
    "PaidTags": "floor",
    "MostlyYes": "lazy-policy",
    "WrongReference": "reference",
    "NoStrip": "equivalent-forms",
    "Generates": "model-use",
    "GullibleJudge": "injection",
    "FlatteredJudge": "injection",
    "JudgeOfTextAlone": "injection",
    "Unseeded": "repeatable side-effects",
    "ClaimsDone": "lazy-policy other-answer",
    "Endless": "episode-end",
    "Crosstalk": "repeatable",
    "OneFileForAll": "repeatable",
    "ToolRaises": "exceptions",
    "ToolDivides": "exceptions",
    "ToolRemembers": "repeatable exceptions",
    "ChangesDirectory": "side-effects",
    "SetsVariables": "side-effects",
    "SetsGlobalSeed": "side-effects",
    "LeavesThreads": "side-effects",
    "HangsOnNothing": "exceptions",
    "LeavesProcesses": "side-effects",
    "AsksSomebody": "side-effects",
    "AlarmCaught": "side-effects",
    "LockInTheRow": "pickling",
    "LockOfTheDataset": "pickling",
    "SlowScore": "latency",
}
"""The check that finds a fault, and others that it also concerns."""

HEALTHY = [
    "Sums",
    "ChoicesInPrompt",
    "FewTwice",
    "TwoTurns",
    "GuessesFirst",
    "ToolAnswers",
    "CleansUp",
    "InTags",
    "Marked",
    "NothingIsRight",
    "NumberAtMark",
    "NearEnough",
    "SeedDecides",
    "ToolIsNeeded",
]
"""What is close to a fault, and none."""


def found(rl_env: str) -> Iterator[tuple[str, EnvFinding]]:
    """All serious findings about this environment, with their checks; no check failed itself.

    Only the call that hangs meets its deadline: where 32 calls start a process each, a loaded machine takes long.
    """
    name = rl_env.rpartition(":")[2]
    config = TrainConfig(rl_env=rl_env, rl_env_timeout=2.0 if name == "HangsOnNothing" else 60.0)
    with closing(Subject(open_environment(config, None))) as subject:
        checks = [check for check in CHECKS if name in ONLY_WHERE_EXPECTED.get(check.name, (name,))]
        for check in checks:
            result = run_check(subject, check)
            assert "itself failed" not in result.skipped, result
            yield from ((check.name, finding) for finding in result.findings if finding.level != "info")


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
    serious = list(found(f"{FAULTY}:{fault}"))
    assert {own} <= {check for check, _ in serious} <= {own, *related}, serious


@pytest.mark.parametrize("healthy", HEALTHY)
@pytest.mark.slow
def test_a_healthy_environment_passes(healthy: str) -> None:
    assert list(found(f"{FAULTY}:{healthy}")) == []


def test_the_case_that_is_shown_is_one_in_which_a_form_of_the_reference_loses_score() -> None:
    (finding,) = [finding for _, finding in found(f"{FAULTY}:NoStripOfOne")]
    assert (finding.level, finding.case_idx) == ("warning", 8), finding


@pytest.mark.slow
def test_what_episodes_leave_behind_is_listed() -> None:
    (finding,) = [finding for _, finding in found(f"{FAULTY}:LeavesProcesses")]
    assert re.match(r"Episodes leave processes behind: \d+, \d+, \d+\.", finding.what)


def test_each_check_finds_a_fault() -> None:
    assert {checks.split()[0] for checks in FAULTS.values()} >= {check.name for check in CHECKS}
