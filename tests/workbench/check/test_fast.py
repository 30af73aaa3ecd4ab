"""The fast checks that run before a training, and the parts that they are made of."""

from __future__ import annotations

import time
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.environment.dataset import build_cases
from aitrain.workbench.check import registry
from aitrain.workbench.check.finding import EnvFinding, Scale
from aitrain.workbench.check.registry import CHECKS, chosen, fast_findings
from aitrain.workbench.check.replies import core_of, equivalent_forms, rewrapped, same_answer, scaffolds, shotguns


class Sums:
    """Sums, with a score that a test may replace."""

    def __init__(self, wrong: float = 0.0, seconds: float = 0.0) -> None:
        self.wrong, self.seconds = wrong, seconds

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"{n} + {3 * n}?", "answer": str(4 * n)} for n in range(11, 40)]

    def score_episode(self, text: str, answer: str) -> float:
        time.sleep(self.seconds)
        return 1.0 if text.strip() == answer else self.wrong

    def reference(self, case_idx: int) -> str:
        return str(4 * (case_idx + 11))


def fast(environment: object, **options: Any) -> list[EnvFinding]:
    cases, _ = build_cases(environment, None)
    return fast_findings(environment, cases, TrainConfig(**options))


def test_a_healthy_environment_has_no_fast_findings() -> None:
    assert fast(Sums()) == []


def test_a_defect_is_found_fast() -> None:
    assert {finding.check for finding in fast(Sums(wrong=1.0)) if finding.level == "fail"} == {"floor", "other-answer"}


def test_only_fast_checks_run_before_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(registry, "run_checks", lambda subject, checks: ran.extend(checks) or [])
    fast(Sums())
    assert ran == [check for check in CHECKS if check.is_fast]
    assert {"repeatable-dataset", "two-ranks"}.isdisjoint(check.name for check in ran)


def test_without_time_left_nothing_more_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FAST_SECONDS", -1.0)
    assert fast(Sums(wrong=1.0)) == []


def test_a_check_that_fails_itself_says_so_and_the_others_run() -> None:
    def broken(_: object) -> Any:
        raise RuntimeError("mine")

    checks = [registry.EnvCheck("broken", "", broken, "rows"), *chosen(["floor"])]
    cases, _ = build_cases(Sums(wrong=1.0), None)
    subject = registry.Subject(registry.OpenedEnvironment(Sums(wrong=1.0), cases), TrainConfig())
    first, second = registry.run_checks(subject, checks)
    subject.close()
    assert first.skipped == "the check itself failed: RuntimeError: mine"
    assert second.findings[0].level == "fail"


@pytest.mark.parametrize(
    ("zero", "full", "score", "share"),
    [
        (0.0, 0.5, 0.25, 0.5),
        (-1.0, 0.0, -0.5, 0.5),
        (0.0, None, 1.0, None),
        (0.0, 1.0, None, None),
        (0.0, 1.0, -1, -1),
    ],
)
def test_a_score_is_a_share_of_what_the_reference_earns(
    zero: float, full: float | None, score: float | None, share: float | None
) -> None:
    assert Scale(zero, full).share(score) == share


@pytest.mark.parametrize(
    ("reply", "core"),
    [
        ("72", "72"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("Let me see. <answer> a, b </answer>\n", "a, b"),
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("The answer is 12.", "12"),
        ("<answer>1</answer> or <answer>2</answer>", "2"),
    ],
)
def test_the_answer_is_taken_out_of_its_format_and_put_back(reply: str, core: str) -> None:
    assert core_of(reply) == core
    assert core_of(rewrapped(reply, "zzz")) == "zzz"


def test_equal_answers_are_recognised() -> None:
    assert same_answer("1,000", "1000.0")
    assert same_answer(" Paris.", "paris")
    assert not same_answer("10", "100")
    assert equivalent_forms("1000")["with thousands separators"] == "1,000"


def test_the_right_answer_is_neither_first_nor_last_in_a_list_of_candidates() -> None:
    for reply in shotguns("#### 5", ["1", "2", "3"]):
        assert reply.index("1") < reply.index("5") < reply.index("3")


def test_the_format_of_a_prompt_is_found() -> None:
    assert scaffolds("Answer in <answer> tags.") == ["<answer></answer>\n"]
    assert scaffolds("After ####, please.") == ["####"]
    assert scaffolds("What is 3 + 4?") == []
