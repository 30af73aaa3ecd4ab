"""Scores and their failures: a score that could not be had is missing data, and is told with the user's line."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import numpy as np
import pytest

from aitrain import EnvironmentFailed, Score, TrainConfig
from aitrain.environment.completion_parser import ToolCall
from aitrain.environment.contract import Case, ScoreResult, Transcript, parse_score
from aitrain.environment.runner import EnvRunner
from aitrain.environment.session import AssistantTurn
from aitrain.execution.failure import FailureCount, as_failure
from tests import runner_calls
from tests.conftest import case_name


def scored_by(score_episode: Callable[..., Any], *texts: str, **options: Any) -> list[ScoreResult]:
    methods = {"score_episode": staticmethod(score_episode), "concurrent": True}
    environment = type("Environment", (), methods)()
    cases = [Case(number, "?", {"prompt": "?"}) for number in range(len(texts or "1"))]
    transcripts = [Transcript(case, text) for case, text in zip(cases, texts or ("an answer",), strict=True)]
    with closing(EnvRunner(environment, TrainConfig(**options))) as runner:
        runner.offer("a model", "a tokenizer")
        plays = runner_calls.open_sessions(runner, cases, [0] * len(cases))
        scored = runner_calls.score(runner, plays, transcripts)
        runner_calls.end(runner, plays)
    return scored


# -- what may be returned


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0.25, 0.25), (True, 1.0), (None, None),
        (np.float32(0.25), 0.25), (np.array([0.25]), 0.25), (Score(None), None),
        ({"score": 0.25}, 0.25), (1.0000000000000002, 1.0), (-1e-17, 0.0),
    ],
    ids=case_name,
)  # fmt: skip
def test_a_score_comes_in_many_types_and_metrics_are_the_numbers_beside_it(value: Any, score: float | None) -> None:
    result = parse_score(value).in_range()

    assert (result.score, type(result.score), result.failure) == (score, type(score), None)
    beside: dict[str, Any] = {"turns": 3, "kept": True, "far": math.inf, "large": 1e308, "note": "text"}
    for given in (Score(score, beside), {"score": score, "metrics": {"turns": 3}, "kept": np.True_, "note": None}):
        assert parse_score(given).metrics == {"turns": 3.0, "kept": 1.0}


@pytest.mark.parametrize(
    ("value", "kind", "told"),
    [
        ("0.5", "wrong_type", "'0.5' (str)"),
        ({"reward": 1.0}, "wrong_type", 'a dict with a number as "score"'),
        (-math.inf, "not_finite", "-inf"),
        (1.5, "out_of_range", "--rl-score-range"),
    ],
    ids=case_name,
)
def test_what_is_no_score_is_unscored_with_its_kind(value: Any, kind: str, told: str) -> None:
    result = parse_score(value).in_range()

    assert result.score is None
    assert result.failure.kind == kind
    assert told in result.failure.message


@pytest.mark.parametrize(
    ("score_range", "value", "kind"),
    [("-1,1", -1.5, "out_of_range"), ([-5, 5], -4, None), ("any", 1e308, "out_of_range"),
     ("any", math.inf, "not_finite")],
)  # fmt: skip
def test_the_option_says_which_scores_are_in_range(score_range: Any, value: float, kind: str | None) -> None:
    (result,) = scored_by(lambda: value, rl_score_range=score_range)

    assert result.score == (value if kind is None else None)
    assert (result.failure and result.failure.kind) == kind


# -- what may go wrong


def fail_deep(text: str) -> float:
    return {"ok": 1.0}[text]


def test_an_error_is_told_with_the_users_line_and_harms_no_other_episode() -> None:
    first, failed, last = scored_by(lambda text: fail_deep(text), "ok", "no", "ok")

    assert (first.score, failed.score, last.score) == (1.0, None, 1.0)
    assert failed.failure.kind == "raised"
    assert "KeyError: 'no'" in failed.failure.message
    assert failed.failure.message.endswith('in fail_deep: return {"ok": 1.0}[text]')
    assert "Traceback" in failed.failure.trace


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])  # the latter is Debian's, and that of Colab
def test_an_error_in_a_library_is_told_with_the_line_that_calls_it(folder: str) -> None:
    library: dict[str, Any] = {}
    source = "def parse(text):\n    raise ValueError(text)"
    exec(compile(source, f"/usr/lib/python3/{folder}/library.py", "exec"), library)

    (failed,) = scored_by(lambda text: library["parse"](text), "no")

    assert "test_scoring.py" in failed.failure.message


def answered(status: int) -> Exception:
    request = httpx.Request("GET", "http://judge")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        *((answered(status), "server") for status in (429, 503)),
        *((answered(status), "raised") for status in (401,)),
        (ConnectionRefusedError("refused"), "server"),
        (type("ClientResponseError", (Exception,), {"status": 503})(), "server"),  # aiohttp
        (type("RateLimitError", (Exception,), {"status_code": 429})(), "server"),  # openai
    ],
)
def test_a_service_that_cannot_be_reached_or_is_busy_is_a_failure_of_its_own_kind(error: Exception, kind: str) -> None:
    assert as_failure(error).kind == kind


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitrain.environment.runner.PAUSES", (0.0, 0.0))


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    ("error", "fails", "tries"),
    [(ConnectionRefusedError("refused"), 9, 3), (ConnectionRefusedError("refused"), 2, 3), (OSError("no"), 2, 1)],
)
def test_a_score_is_tried_again_twice_where_a_service_failed(error: Exception, fails: int, tries: int) -> None:
    attempts: list[int] = []

    def score_episode() -> float:
        attempts.append(1)
        if len(attempts) <= fails:
            raise error
        return 1.0

    (result,) = scored_by(score_episode)
    assert len(attempts) == tries
    assert (result.score, result.failure is None) == ((1.0, True) if fails < tries else (None, False))


class Looks:
    """Asks a service that is away, in a tool."""

    def __init__(self) -> None:
        self.asked = 0

    def get_tools(self) -> list[Any]:
        return [self.look]

    def look(self) -> str:
        """Look."""
        self.asked += 1
        raise ConnectionRefusedError("refused")

    def score_episode(self) -> float:
        return 1.0


@pytest.mark.usefixtures("no_pause")
def test_what_changes_an_episode_is_never_called_twice() -> None:
    environment, case = Looks(), Case(0, "?", {"prompt": "?"})
    with closing(EnvRunner(environment, TrainConfig())) as runner:
        plays = runner_calls.open_sessions(runner, [case], [0])
        runner_calls.respond(runner, plays, [AssistantTurn("", (ToolCall("look", {}),))])
        runner_calls.score(runner, plays, [Transcript(case, "hello")])
    assert environment.asked == 1


# -- over a whole run


@pytest.mark.parametrize(
    ("batches", "max_failed", "has_failures", "ends", "why"),
    [
        ([0, 0, 5, 0, 0, 0], 1.0, True, 6, "of 8 episodes of the last one 0 were scored, and 8 failed"),
        ([0, 0, 0], 1.0, False, 3, "Is a `return` missing?"),  # no failure
        ([4, 0, 0, 0, 0], 1.0, False, None, ""),  # left unscored on purpose
        ([3, 3, 4, 3, 3, 3], 0.5, True, 6, "3 were scored, and 5 failed"),  # exactly half is not too many
        ([0], 1.0, True, "run", "No episode of the run was scored"),  # too short for patience
    ],
)
def test_three_batches_in_a_row_that_teach_nothing_end_the_run_and_so_does_a_short_run_of_them(
    batches: list[int], max_failed: float, has_failures: bool, ends: int | str | None, why: str
) -> None:
    """`batches` are the scores of each, of 8 episodes."""
    count, ended, told = FailureCount(max_failed), None, ""
    if has_failures:
        assert count.first_of_each([("raised", "the first"), ("raised", "another")]) == ["the first"]
        assert count.first_of_each([("raised", "one more")]) == []
    try:
        for number, scores in enumerate(batches, 1):
            ended = number
            count.after_batch(scores, 8 - scores if has_failures else 0, 8)
        ended = "run"
        count.after_run()
        ended = None
    except EnvironmentFailed as error:
        told = str(error)
    assert ended == ends
    assert why in told
    assert told.endswith("the first") == (has_failures and ends is not None)


def test_calls_that_hang_are_told_once_and_64_of_them_end_the_run_with_the_line() -> None:
    count = FailureCount()
    notes = [count.after_abandoned(threads, "") for threads in (0, 2, 3, 0, 63)]

    assert [note is not None for note in notes] == [False, True, False, False, False]
    with pytest.raises(EnvironmentFailed, match=r"64 calls .*\nthe line\n.*--rl-env-isolation process") as caught:
        count.after_abandoned(64, "the line")
    assert caught.value.exit_code == 3
