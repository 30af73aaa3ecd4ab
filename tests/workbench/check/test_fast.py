"""The fast checks that run before a training, and the parts that they are made of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.environment.dataset import build_cases
from aitrain.workbench.check.finding import EnvFinding, Scale
from aitrain.workbench.check.registry import CHECKS, CheckResult, EnvCheck, chosen, run_checks
from aitrain.workbench.check.replies import core_of, equivalent_forms, rewrapped, same_answer, scaffolds, shotguns
from aitrain.workbench.check.subject import CheckClock, Subject
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.player import Constant


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


def subject_of(environment: object, **limits: float) -> Subject:
    return Subject(
        OpenedEnvironment(environment, build_cases(environment, None)[0]), TrainConfig(), clock=CheckClock(**limits)
    )


def run(subject: Subject, *checks: EnvCheck) -> list[CheckResult]:
    with closing(subject):
        return list(run_checks(subject, checks))


def play_many(subject: Subject) -> Iterator[EnvFinding]:
    subject.play((case, Constant(str(number))) for case in subject.sample for number in range(1000))
    yield EnvFinding("many", "info", "All were played.")


def test_a_check_that_takes_too_long_is_stopped_and_the_next_one_runs() -> None:
    many, last = run(
        subject_of(Sums(seconds=0.01), check_seconds=0.2), EnvCheck("many", "", play_many), *chosen(["dataset"])
    )
    assert (many.findings, many.skipped) == ((), "took longer than 0.2 seconds")
    assert last.skipped == ""


def test_after_the_time_of_all_checks_nothing_more_is_played() -> None:
    subject = subject_of(Sums(wrong=1.0), budget=-1.0)
    skipped = {result.name: result.skipped for result in run(subject, *CHECKS)}
    assert {name for name, reason in skipped.items() if reason != "no time left"} == {
        *("dataset", "duplicates", "leaked-answer", "pickling"),
        *("repeatable-episode", "isolation", "episode-end", "group-score"),
    }
    assert subject.episodes == []


def test_a_check_that_fails_itself_says_so_and_the_others_run() -> None:
    def broken(_: object) -> Any:
        raise RuntimeError("mine")

    checks = [EnvCheck("broken", "", broken, "rows"), *chosen(["floor"])]
    first, second = run(subject_of(Sums(wrong=1.0)), *checks)
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


def test_replies_are_made_of_what_the_prompt_and_the_reference_show() -> None:
    assert same_answer("1,000", "1000.0")
    assert same_answer(" Paris.", "paris")
    assert not same_answer("10", "100")
    assert equivalent_forms("1000")["with thousands separators"] == "1,000"
    for reply in shotguns("#### 5", ["1", "2", "3"]):
        assert reply.index("1") < reply.index("5") < reply.index("3")
    assert scaffolds("Answer in <answer> tags.") == ["<answer></answer>\n"]
    assert scaffolds("After ####, please.") == ["####"]
    assert scaffolds("What is 3 + 4?") == []
