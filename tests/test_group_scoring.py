"""`score_group`: what it is given, what it may return, and what comes of failures."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import numpy
import pytest

from aitrain import Score, TrainConfig
from aitrain.environment.contract import Case, ScoreResult
from aitrain.environment.runner import start_runner
from aitrain.environment.session import Group, GroupMember
from aitrain.execution.failure import Failure
from tests.rollout.scripted import Asks, assistant, user

ASKED = [user("q")]
FAILED = Failure("raised", "raised: ValueError", place="score_episode")


def member(text: str, score: float | None, failure: Failure | None = None) -> GroupMember:
    answer = [assistant(text)]
    return GroupMember(answer, text, [*ASKED, *answer], ScoreResult(score, {"own": 1.0}, failure))


GROUP = Group(
    Case(7, ASKED, {"prompt": ASKED, "word": "fig", "scores": "a column"}, 2),
    [member("a", 0.25), member("bb", 0.5), member("ccc", None, FAILED)],
)


class Plain(Asks):
    def score_episode(self) -> float:
        return 0.0


class Returns(Plain):
    """The next of what it is given, which it raises if it is an exception."""

    def __init__(self, *returned: Any) -> None:
        self.returned = list(returned)

    async def score_group(self) -> Any:
        result = self.returned.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def scored(environment: Any, *groups: Group, **options: Any) -> list[list[ScoreResult]]:
    with closing(start_runner(environment, TrainConfig(**options))) as runner:
        return [asyncio.run(runner.score_group(group)) for group in groups or [GROUP]]


def test_it_is_called_by_signature_with_one_entry_for_each_episode() -> None:
    seen: dict[str, Any] = {}

    class Looks(Plain):
        def score_group(self, **everything: Any) -> Any:
            seen.update(everything)
            return [1, 1, 1]

    scored(Looks())
    assert seen.pop("messages")[2] == [*ASKED, assistant("ccc")]
    assert seen.pop("completions")[2] == [assistant("ccc")]
    assert seen == {
        "texts": ["a", "bb", "ccc"], "scores": [0.25, 0.5, None], "metrics": [{"own": 1.0}] * 3, "case_idx": 7,
        "prompt": ASKED, "case": dict(GROUP.case.row), "word": "fig",
    }  # fmt: skip


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("returned", [numpy.array([0.5, 0.25, 1.0]), [Score(0.5, {"rank": 3}), {"score": 0.25}, "x"]])
def test_its_scores_take_the_place_of_the_episodes_own_metrics_are_added_and_a_failure_stays(
    returned: Any, isolation: str
) -> None:
    (results,) = scored(Returns(returned), rl_env_isolation=isolation)
    assert [(result.score, result.failure) for result in results] == [(0.5, None), (0.25, None), (None, FAILED)]
    assert results[0].metrics == {"own": 1.0, **({"rank": 3.0} if isinstance(returned, list) else {})}


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize(
    ("returned", "kinds"),
    [
        ([1.0], ["wrong_type", "wrong_type"]),
        ([0.5, 2.0, 0.5], [None, "out_of_range"]),
        (ValueError("no judge"), ["raised", "raised"]),
    ],
)
def test_any_other_result_is_a_failure_of_its_episodes_and_of_no_other_group(
    returned: Any, kinds: list[str | None], isolation: str
) -> None:
    lost, fine = scored(Returns(returned, [0.5, 0.25, 0.5]), GROUP, GROUP, rl_env_isolation=isolation)
    assert [result.failure and result.failure.kind for result in lost[:2]] == kinds
    assert {result.failure.place for result in lost if result.failure} == {"score_group", "score_episode"}
    assert lost[2].failure == FAILED
    assert [result.score for result in fine] == [0.5, 0.25, None]


def test_a_list_of_another_length_is_told_by_its_length() -> None:
    (results,) = scored(Returns([0.5] * 40))
    assert "returned 40 scores" in str(results[0].failure)


def test_a_call_that_cannot_reach_a_service_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitrain.environment.runner.PAUSES", (0.0, 0.0))
    (results,) = scored(Returns(ConnectionRefusedError("no judge"), [0.5] * 3))
    assert results[0].score == 0.5
