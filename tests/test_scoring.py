"""Scores and their failures: a score that could not be had is missing data, and is told with the user's line."""

from __future__ import annotations

import asyncio
import math
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np
import pytest

from aitrain import ConfigError, EnvironmentFailed, Score, TrainConfig
from aitrain.environment.contract import Case, Transcript
from aitrain.environment.failure_count import ABANDONED_LIMIT, FailureCount
from aitrain.environment.runner import EnvRunner, EnvSession, start_runner
from aitrain.environment.score_parsing import ScoreResult
from aitrain.environment.session import AssistantTurn
from aitrain.environment.tool_call_parser import ToolCall
from tests import runner_calls


def played_by(
    score_episode: Callable[..., Any], *texts: str, **options: Any
) -> tuple[list[ScoreResult], list[EnvSession]]:
    methods = {"score_episode": staticmethod(score_episode), "concurrent": True}
    environment = type("Environment", (), methods)()
    cases = [Case(number, "?", {"prompt": "?"}) for number in range(len(texts))]
    with closing(EnvRunner(environment, TrainConfig(**options))) as runner:
        runner.offer("a model", "a tokenizer")
        plays = runner_calls.open_sessions(runner, cases, [0] * len(cases))
        scored = runner_calls.score(
            runner, plays, [Transcript(case, text) for case, text in zip(cases, texts, strict=True)]
        )
        runner_calls.end(runner, plays)
    return scored, plays


def scored_by(score_episode: Callable[..., Any], *texts: str, **options: Any) -> list[ScoreResult]:
    return played_by(score_episode, *texts or ("an answer",), **options)[0]


def returning(value: Any) -> ScoreResult:
    (one,) = scored_by(lambda: value)

    async def slowly() -> Any:
        await asyncio.sleep(0)
        return value

    (other,) = scored_by(slowly)
    assert (one.score, one.metrics, one.failure) == (other.score, other.metrics, other.failure)
    return one


def torch_scalar() -> Any:
    import torch

    return torch.tensor(0.25, requires_grad=True)


# -- what may be returned


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (0.25, 0.25), (0, 0.0), (1, 1.0), (True, 1.0), (False, 0.0), (None, None),
        (np.float32(0.25), 0.25), (np.float64(0.25), 0.25), (np.int64(1), 1.0), (np.True_, 1.0),
        (np.array(0.25), 0.25), (np.array([0.25]), 0.25),
        (Score(0.25), 0.25), (Score(None), None), (Score(np.float32(0.25)), 0.25),  # type: ignore[arg-type]
        ({"score": 0.25}, 0.25), ({"score": None, "why": 1}, None),
    ],
    ids=repr,
)  # fmt: skip
def test_a_score_comes_in_many_types(value: Any, score: float | None) -> None:
    result = returning(value)

    assert result.score == score
    assert type(result.score) in (float, type(None))
    assert result.failure is None


def test_a_torch_scalar_is_a_score() -> None:
    assert returning(torch_scalar()).score == 0.25


@pytest.mark.parametrize(
    "value",
    [
        Score(0.5, {"turns": 3, "kept": True, "far": math.inf, "note": "text"}),  # type: ignore[dict-item]
        {"score": 0.5, "turns": 3, "kept": True, "far": math.inf, "note": "text"},
        {"score": 0.5, "metrics": {"turns": 3}, "kept": np.True_, "note": None},
    ],
    ids=repr,
)
def test_metrics_are_the_numbers_beside_the_score(value: Any) -> None:
    assert returning(value).metrics == {"turns": 3.0, "kept": 1.0}


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("0.5", "wrong_type", "returned '0.5' (str), not a number from 0 to 1"),
        ([0.5], "wrong_type", "returned [0.5] (list), not a number from 0 to 1"),
        (np.array([0.5, 1.0]), "wrong_type", "returned array([0.5, 1. ]) (ndarray), not a number from 0 to 1"),
        (np.array([]), "wrong_type", "(ndarray), not a number from 0 to 1"),
        ({"reward": 1.0}, "wrong_type", "returned {'reward': 1.0} (dict), and a dict needs a \"score\""),
        ({"score": "good"}, "wrong_type", "returned {'score': 'good'} (dict), not a number from 0 to 1"),
        (0.5j, "wrong_type", "(complex), not a number"),
        ("x" * 500, "wrong_type", "... (str), not a number"),
        (math.nan, "not_finite", "returned nan, not a number from 0 to 1"),
        (-math.inf, "not_finite", "returned -inf, not a number from 0 to 1"),
        (10**400, "not_finite", "returned inf"),
        (1.5, "out_of_range", "returned 1.5, which is not from 0 to 1"),
        (-1, "out_of_range", "returned -1, which is not from 0 to 1"),
        (100, "out_of_range", "returned 100, which is not from 0 to 1"),
        (Score(7.0), "out_of_range", "returned 7, which is not from 0 to 1"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_what_is_no_score_is_unscored_with_its_kind(value: Any, kind: str, message: str) -> None:
    result = returning(value)

    assert result.score is None
    assert result.failure is not None
    assert result.failure.kind == kind
    assert message in result.failure.message
    assert len(result.failure.message) < 200


def ranged(value: Any, score_range: Any) -> ScoreResult:
    (result,) = scored_by(lambda: value, rl_score_range=score_range)
    return result


@pytest.mark.parametrize(
    ("score_range", "value"),
    [("-1,1", -1), ("-1,1", 1.0), ("0, 10", 7.5), ([-5, 5], -4), ((0.5, 2), 2), ("any", -1e9), ("any", 100)],
)
def test_the_option_says_which_scores_are_in_range(score_range: Any, value: float) -> None:
    assert (ranged(value, score_range).score, ranged(value, score_range).failure) == (value, None)


@pytest.mark.parametrize(("value", "score"), [(1.0000000000000002, 1.0), (-1e-17, 0.0), (0.1 + 0.2, 0.1 + 0.2)])
def test_a_score_that_rounding_put_outside_of_the_range_is_its_bound(value: float, score: float) -> None:
    assert ranged(value, "0,1").score == score


def test_a_score_out_of_range_is_told_with_the_option_that_sets_the_range() -> None:
    for score_range, value, told in [
        ("0,1", 2, "from 0 to 1"),
        ("-1,1", -1.5, "from -1 to 1"),
        ("1,5", 0, "from 1 to 5"),
    ]:
        failure = ranged(value, score_range).failure
        assert failure is not None
        assert failure.kind == "out_of_range"
        assert failure.message == f"returned {value:g}, which is not {told} (--rl-score-range LOW,HIGH or any)"


def test_with_any_range_a_score_is_still_a_finite_number() -> None:
    failure = ranged(math.inf, "any").failure

    assert failure is not None
    assert (failure.kind, failure.message) == ("not_finite", "returned inf, not a finite number")


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize(("score_range", "score"), [("0,1", 0.0), ("-1,1", 0.0), ("1,5", 1.0), ("any", 0.0)])
def test_an_episode_that_a_limit_ends_has_a_score_in_range(score_range: str, score: float, isolation: str) -> None:
    class Plays:
        def episode(self) -> Any:
            yield None
            return 5.0

    case = Case(0, "?", {"prompt": "?"})
    with closing(start_runner(Plays(), TrainConfig(rl_score_range=score_range, rl_env_isolation=isolation))) as runner:
        plays = runner_calls.open_sessions(runner, [case], [0])
        (result,) = runner_calls.score(runner, plays, [Transcript(case, "")])
        runner_calls.end(runner, plays)
    assert result.score == score


@pytest.mark.parametrize("wrong", ["1,0", "0", "0,1,2", "low,high", "0,inf", "nan,1", "1,1", "all"])
def test_a_range_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="rl_score_range: must be LOW,HIGH"):
        TrainConfig(rl_score_range=wrong)


# -- what may go wrong


def fail_deep(text: str) -> float:
    return {"ok": 1.0}[text]


def leave(text: str) -> float:
    raise SystemExit(text)


def give_up(text: str) -> float:
    raise asyncio.CancelledError(text)


async def fail_slowly(text: str) -> float:
    await asyncio.sleep(0)
    return fail_deep(text)


async def give_up_slowly(text: str) -> float:
    return give_up(text)


@pytest.mark.parametrize(
    ("score_episode", "error", "line"),
    [
        (lambda text: fail_deep(text), "KeyError: 'no'", 'in fail_deep: return {"ok": 1.0}[text]'),
        (fail_slowly, "KeyError: 'no'", 'in fail_deep: return {"ok": 1.0}[text]'),
        (leave, "SystemExit: no", "in leave: raise SystemExit(text)"),
        (give_up_slowly, "CancelledError: no", "in give_up: raise asyncio.CancelledError(text)"),
    ],
)
def test_an_error_is_told_with_the_users_line_and_harms_no_other_episode(
    score_episode: Callable[..., Any], error: str, line: str
) -> None:
    async def mixed(text: str) -> Any:
        return 1.0 if text == "ok" else await score_episode(text)

    chosen = mixed if asyncio.iscoroutinefunction(score_episode) else lambda text: text == "ok" or score_episode(text)
    first, failed, last = scored_by(chosen, "ok", "no", "ok")

    assert (first.score, failed.score, last.score) == (1.0, None, 1.0)
    assert failed.failure is not None
    assert failed.failure.kind == "raised"
    assert failed.failure.message.startswith(f"raised: {error}\nat {__file__}, line ")
    assert failed.failure.message.endswith(line)
    assert "Traceback" in failed.failure.trace
    assert "Traceback" not in failed.failure.message


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no picture")


def test_a_value_that_cannot_even_be_shown_is_a_failure_like_any_other() -> None:
    (result,) = scored_by(lambda: Unshowable())

    assert result.failure is not None
    assert "no picture" in result.failure.message


def test_a_method_that_is_async_in_all_but_name_is_waited_for() -> None:
    async def slowly() -> float:
        return 0.25

    (result,) = scored_by(lambda: slowly())

    assert result.score == 0.25


def test_async_episodes_are_scored_together_and_come_back_in_order() -> None:
    waiting: list[str] = []

    async def score_episode(text: str) -> float:
        waiting.append(text)
        while len(waiting) < 3:
            await asyncio.sleep(0.001)
        return float(text)

    results = scored_by(score_episode, "0.1", "0.2", "0.3")

    assert [result.score for result in results] == [0.1, 0.2, 0.3]


def test_the_time_that_a_score_took_is_on_record() -> None:
    _, (play,) = played_by(lambda text: threading.Event().wait(0.02) or 1.0, "an answer")

    assert 0.02 <= play.seconds < 10


def test_scores_are_asked_for_at_the_same_time_and_come_back_in_order() -> None:
    everyone = threading.Barrier(40)

    def score_episode(text: str) -> float:
        everyone.wait(30)
        return float(text)

    texts = [str(number / 100) for number in range(40)]
    assert [result.score for result in scored_by(score_episode, *texts)] == [number / 100 for number in range(40)]


def test_as_many_calls_run_at_a_time_as_the_option_says() -> None:
    running: list[int] = []
    most: list[int] = []

    def score_episode() -> float:
        running.append(1)
        most.append(len(running))
        threading.Event().wait(0.005)
        running.pop()
        return 1.0

    scored_by(score_episode, *"abcdefgh", rl_env_workers=2)
    assert max(most) == 2


def test_a_score_that_never_comes_is_given_up_and_harms_no_other_episode() -> None:
    never = threading.Event()

    def score_episode(text: str) -> float:
        if text == "no":
            never.wait()
        return 1.0

    first, failed, last = scored_by(score_episode, "ok", "no", "ok", rl_env_timeout=0.3)
    never.set()

    assert (first.score, last.score) == (1.0, 1.0)
    assert failed.failure is not None
    assert failed.failure.kind == "timed_out"
    assert "never.wait()" in failed.failure.message
    assert failed.failure.place == "score_episode"


@pytest.mark.parametrize(("retries", "score"), [(0, None), (1, None), (2, 1.0), (5, 1.0)])
def test_a_failed_score_is_tried_again_as_often_as_the_option_says(retries: int, score: float | None) -> None:
    attempts: list[int] = []

    def score_episode() -> float:
        attempts.append(1)
        if len(attempts) < 3:
            raise OSError("not now")
        return 1.0

    (result,) = scored_by(score_episode, rl_env_retries=retries)
    assert result.score == score
    assert len(attempts) == min(3, retries + 1)


def test_a_wrong_score_is_not_asked_for_again() -> None:
    attempts: list[int] = []

    (result,) = scored_by(lambda: attempts.append(1), rl_env_retries=3)
    assert result.failure is None
    assert len(attempts) == 1


class Answers(BaseHTTPRequestHandler):
    """Answers with the status that the path names, or too late."""

    timeout = 5.0

    def do_GET(self) -> None:
        if self.path == "/late":
            self.connection.recv(1)  # until the client gives up
        else:
            self.send_response(int(self.path[1:]))
            self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def with_httpx(url: str) -> None:
    httpx.get(url, timeout=0.2).raise_for_status()


def with_urllib(url: str) -> None:
    with urllib.request.urlopen(url, timeout=0.2):
        pass


def in_a_task_group(url: str) -> None:
    async def ask() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(with_httpx, url))

    asyncio.run(ask())


def in_other_words(url: str) -> None:
    try:
        with_httpx(url)
    except httpx.HTTPError as error:
        raise ValueError("no judge") from error


def raised(error: Exception) -> Callable[[str], None]:
    def raises(_: str) -> None:
        raise error

    return raises


def named(name: str, **values: Any) -> Callable[[str], None]:
    """Raises an error of a library that need not be installed."""
    return raised(type(name, (Exception,), values)())


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitrain.environment.runner.PAUSES", (0.0, 0.0))


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    ("call", "path", "tries"),
    [
        *((call, path, 3) for call in (with_httpx, with_urllib) for path in ("429", "502", "503", "504", "late")),
        *((call, "503", 3) for call in (in_a_task_group, in_other_words)),
        *((call, path, 1) for call in (with_httpx, with_urllib) for path in ("401", "404", "500")),
        (raised(ConnectionRefusedError("refused")), "", 3),
        (raised(ConnectionResetError("reset")), "", 3),
        (named("ConnectError"), "", 3),  # httpx
        (named("ClientResponseError", status=503), "", 3),  # aiohttp
        (named("RateLimitError", status_code=429), "", 3),  # openai
        (named("APIConnectionError"), "", 3),
        (raised(TimeoutError("a deadline of one's own")), "", 1),
        (raised(OSError("no space")), "", 1),
        (raised(ValueError("503")), "", 1),
    ],
)
def test_a_score_that_failed_because_of_a_service_is_tried_again_twice(
    call: Callable[[str], None], path: str, tries: int, address: str
) -> None:
    attempts: list[int] = []

    def score_episode() -> float:
        attempts.append(1)
        call(f"{address}/{path}")
        return 1.0

    (result,) = scored_by(score_episode)
    assert len(attempts) == tries
    assert result.failure is not None
    assert result.failure.kind == ("server" if tries == 3 else "raised")


def test_a_score_that_failed_because_of_a_service_is_not_tried_again_where_the_option_says_so() -> None:
    attempts: list[int] = []

    def score_episode() -> float:
        attempts.append(1)
        raise ConnectionRefusedError("refused")

    scored_by(score_episode, rl_env_retries=0)
    assert len(attempts) == 1


class Asks:
    """Asks a service in each method, which is away for one of them."""

    def __init__(self, away: str) -> None:
        self.away, self.asked = away, list[str]()

    def ask(self, place: str) -> str:
        self.asked.append(place)
        if place == self.away:
            raise ConnectionRefusedError("refused")
        return place


class Steps(Asks):
    def start(self) -> Steps:
        return self

    def step(self, reply: str) -> None:
        self.ask("step")

    def score(self) -> float:
        return len(self.ask("score")) / 10


class Episodes(Asks):
    def episode(self) -> Iterator[None]:
        yield
        self.ask("episode")


class Looks(Asks):
    def get_tools(self) -> list[Any]:
        return [self.look]

    def look(self) -> str:
        """Look."""
        return self.ask("look")

    def score_episode(self) -> float:
        return 1.0


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    ("environment", "turn", "retries", "asked"),
    [
        (Steps("step"), AssistantTurn("hello"), 2, ["step"]),
        (Steps("score"), AssistantTurn("hello"), None, ["step", "score"]),
        (Episodes("episode"), AssistantTurn("hello"), 2, ["episode"]),
        (Looks("look"), AssistantTurn("", (ToolCall("look", {}),)), 2, ["look"]),
    ],
)
def test_what_changes_an_episode_is_never_called_twice(
    environment: Asks, turn: AssistantTurn, retries: int | None, asked: list[str]
) -> None:
    case = Case(0, "?", {"prompt": "?"})
    with closing(EnvRunner(environment, TrainConfig(rl_env_retries=retries))) as runner:
        plays = runner_calls.open_sessions(runner, [case], [0])
        runner_calls.respond(runner, plays, [turn])
        runner_calls.score(runner, plays, [Transcript(case, "hello")])
    assert environment.asked == asked


# -- over a whole run


def test_of_each_kind_of_failure_the_first_is_told_once() -> None:
    count = FailureCount()

    assert count.first_of_each([("raised", "a"), ("raised", "b"), ("not_finite", "c")]) == ["c", "a"]
    assert count.first_of_each([("raised", "d"), ("out_of_range", "e")]) == ["e"]


def test_three_batches_in_a_row_without_a_score_end_the_run() -> None:
    count = FailureCount(reported={"raised": "score_episode raised: ValueError"})
    for scores in (0, 0, 5, 0, 0):
        count.after_batch(scores, failures=4, episodes=8)

    with pytest.raises(EnvironmentFailed, match="failed on every episode of 3 batches in a row") as caught:
        count.after_batch(0, failures=4, episodes=8)
    assert str(caught.value).endswith("score_episode raised: ValueError")  # the page of the run shows it, too


def test_of_several_environments_that_fail_the_message_names_one() -> None:
    count = FailureCount()
    count.of("hotel").first_of_each([("raised", "start raised: KeyError")])
    count.after_batch(0, failures=4, episodes=8)
    with pytest.raises(EnvironmentFailed, match=r"failed on every episode of the whole run.*\n.*\nhotel: start raised"):
        count.after_run()


def test_three_batches_in_a_row_with_too_many_failures_end_the_run() -> None:
    count = FailureCount(max_failed=0.5)
    for failures in (5, 5, 4, 5, 5):  # exactly half is not too many
        count.after_batch(8 - failures, failures, episodes=8)

    with pytest.raises(EnvironmentFailed, match="More than 50% of the episodes failed in 3 batches in a row") as caught:
        count.after_batch(3, failures=5, episodes=8)
    assert "5 of 8" in str(caught.value)


def test_an_environment_that_only_ever_says_none_ends_the_run_with_a_question() -> None:
    count = FailureCount()
    count.after_batch(0, failures=0, episodes=8)
    count.after_batch(0, failures=0, episodes=8)

    with pytest.raises(EnvironmentFailed, match="returned None for every episode") as caught:
        count.after_batch(0, failures=0, episodes=8)
    assert "Is a `return` missing?" in str(caught.value)


def test_batches_that_an_environment_leaves_unscored_on_purpose_do_not_end_the_run() -> None:
    count = FailureCount()
    for scores in (4, 0, 0, 0, 0):
        count.after_batch(scores, failures=0, episodes=8)
    count.after_run()


def test_a_run_too_short_for_patience_is_no_success_when_nothing_was_scored() -> None:
    count = FailureCount(reported={"raised": "score_episode raised: ValueError"})
    count.after_batch(0, failures=4, episodes=8)

    with pytest.raises(EnvironmentFailed, match="failed on every episode of the whole run"):
        count.after_run()


@pytest.mark.parametrize(("scores", "ends_well"), [([8, 0], False), ([8, 0, 0], False), ([8, 8, 8, 0], True)])
def test_a_run_too_short_for_patience_is_no_success_when_it_ends_without_an_environment(
    scores: list[int], ends_well: bool
) -> None:
    count = FailureCount(reported={"crashed": "score_episode crashed"})
    for scored in scores:
        count.after_batch(scored, failures=8 - scored, episodes=8)

    with nullcontext() if ends_well else pytest.raises(EnvironmentFailed, match="failed on every episode of the last"):
        count.after_run()


def test_the_first_thread_that_hangs_is_told_once() -> None:
    count = FailureCount()
    notes = [count.after_abandoned(threads, list) for threads in (0, 2, 3, 0, 63)]

    assert [note is not None for note in notes] == [False, True, False, False, False]
    assert "its thread was abandoned and keeps running" in str(notes[1])


@pytest.mark.slow
def test_64_threads_that_hang_end_the_run_with_the_line_and_the_advice_to_use_processes() -> None:
    never = threading.Event()
    environment = type("Hangs", (), {"score_episode": staticmethod(lambda text: never.wait())})()  # the line
    cases = [Case(number, "?", {"prompt": "?"}) for number in range(ABANDONED_LIMIT)]
    with closing(EnvRunner(environment, TrainConfig(rl_env_timeout=0.2))) as runner:
        plays = runner_calls.open_sessions(runner, cases, [0] * len(cases))
        scored = runner_calls.score(runner, plays, [Transcript(case, "an answer") for case in cases])
        runner_calls.end(runner, plays)
        hanging, line = runner.pool.abandoned, runner.pool.last_hang
        never.set()

    assert {one.failure and one.failure.kind for one in scored} == {"timed_out"}
    assert hanging == ABANDONED_LIMIT == 64
    with pytest.raises(EnvironmentFailed, match="64 calls to the environment hang") as caught:
        FailureCount().after_abandoned(hanging, lambda: ["", line])
    assert caught.value.exit_code == 3
    assert "test_scoring.py, line " in str(caught.value)
    assert "# the line" in str(caught.value)
    assert "use --rl-env-isolation process" in str(caught.value)


def test_a_run_that_had_nothing_left_to_do_is_a_success() -> None:
    FailureCount().after_run()
