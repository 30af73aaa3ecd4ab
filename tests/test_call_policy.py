"""Environments that keep state on themselves are scored as if their calls ran one after another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.environment.contract import Case, Transcript
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.environment.session import AssistantTurn
from aitrain.environment.tool_call_parser import ToolCall
from tests import runner_calls

EPISODES = 12


class Rows:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.case: Any = None
        self.count = 0
        self.running = self.most = 0
        self.cache: dict[Any, Any] = {}
        self.log: list[Any] = []

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": "?"}]


class Meter:
    """How many calls run at the same time."""

    def __init__(self) -> None:
        self.lock, self.running, self.most = threading.Lock(), 0, 0

    def __enter__(self) -> None:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)

    def __exit__(self, *_: Any) -> None:
        with self.lock:
            self.running -= 1


METER = Meter()


@pytest.fixture(autouse=True)
def meter() -> Meter:
    METER.__init__()  # type: ignore[misc]
    return METER


def wait() -> None:
    """As a slow judge would, or `model.generate`."""
    with METER:
        time.sleep(0.005)


def scored(environment: Any, batches: int = 1, **options: Any) -> tuple[list[float | None], list[str]]:
    """The scores of batches of episodes, each of its own case, and what the user was told."""
    told: list[str] = []
    cases = [Case(number, "?", {"prompt": "?"}) for number in range(EPISODES)]
    scores: list[float | None] = []
    with closing(start_runner(environment, TrainConfig(**options))) as runner:
        runner.notify = told.append
        runner.offer("a model", "a tokenizer")
        for _ in range(batches):
            plays = runner_calls.open_sessions(runner, cases, range(EPISODES))
            results = runner_calls.score(runner, plays, [Transcript(case, str(case.case_idx)) for case in cases])
            assert [result.failure for result in results] == [None] * EPISODES
            scores += [result.score for result in results]
            runner_calls.end(runner, plays)
    return scores, told


def serially(environment: Any, batches: int = 1) -> list[float]:
    """What a loop over the completions comes to, which is how AITraining scores."""
    scores = []
    for _ in range(batches):
        for number in range(EPISODES):
            score = environment.score_episode(model=None, tokenizer=None, completion=str(number), case_idx=number)
            scores.append(asyncio.run(score) if asyncio.iscoroutine(score) else score)
    return scores


# -- score_episode


class SetsAroundASleep(Rows):
    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        self.case = case_idx
        wait()
        return float(self.case == case_idx)


class SetsAsync(Rows):
    async def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        self.case = case_idx
        with METER:
            await asyncio.sleep(0.005)
        return float(self.case == case_idx)


class SetsAndUsesASharedCounter(Rows):
    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        self.case = case_idx
        wait()
        with self.lock:
            self.count += 1
        return float(self.case == case_idx)


class SetsThroughAHandler(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.handlers = {"note": self.note}

    def note(self, case_idx: int) -> None:
        self.case = case_idx

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        self.case = None
        self.handlers["note"](case_idx)
        wait()
        return float(self.case == case_idx)


@pytest.mark.parametrize("kind", [SetsAroundASleep, SetsAsync, SetsAndUsesASharedCounter, SetsThroughAHandler])
def test_calls_that_set_attributes_get_a_copy_each_and_run_at_the_same_time(kind: Any, meter: Meter) -> None:
    environment = kind()

    scores, told = scored(environment, batches=2)

    assert scores == [1.0] * EPISODES * 2
    assert meter.most > 1
    assert len(told) == 1
    assert told[0].startswith(f"{kind.__name__}.")
    assert "self.case (test_call_policy.py, line " in told[0]
    assert "Each call therefore gets a copy" in told[0]
    assert environment.case is None
    assert environment.count in (0, 2 * EPISODES)


class Counts(Rows):
    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        self.count += 1
        before = self.count
        wait()
        return 1.0 / before


class RunningBest(Rows):
    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        is_better = case_idx % 5 > (self.case or 0)
        wait()
        self.case = max(case_idx % 5, self.case or 0)
        return float(is_better)


class Novelty(Rows):
    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        kind = case_idx % 3
        wait()
        is_new = kind not in self.cache
        self.cache[kind] = case_idx
        return float(is_new)


class CountsAsync(Rows):
    async def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        before = self.count
        with METER:
            await asyncio.sleep(0.002)
        self.count = before + 1
        return 1.0 / self.count


class Uncopyable(SetsAroundASleep):
    __slots__ = ("other",)


class ClosesWhatItShares(SetsAroundASleep):
    def __del__(self) -> None:
        self.log.append("closed")


@pytest.mark.parametrize("kind", [Counts, RunningBest, Novelty, CountsAsync, Uncopyable, ClosesWhatItShares])
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_values_that_go_from_call_to_call_are_those_of_calls_one_after_another(
    kind: Any, isolation: str, meter: Meter
) -> None:
    environment = kind()

    scores, told = scored(environment, batches=2, rl_env_isolation=isolation)

    assert scores == serially(kind(), batches=2)
    if isolation == "thread":
        assert meter.most == 1
        assert len(told) == 1
        assert "one after another" in told[0]
        assert "with self.lock" in told[0]
    assert environment.log == []
    assert len("".join(told).splitlines()) <= 5


class SharedCache(Rows):
    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        if case_idx not in self.cache:
            wait()
            self.cache[case_idx] = case_idx / EPISODES
        return float(self.cache[case_idx])


class OwnLock(Rows):
    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        wait()
        with self.lock:
            self.count += 1
            self.log.append(completion)
        return 1.0


class NoState(Rows):
    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        case = case_idx
        wait()
        return float(case == case_idx)


@pytest.mark.parametrize("kind", [SharedCache, OwnLock, NoState])
def test_environments_that_bear_it_run_at_the_same_time_without_a_word(kind: Any, meter: Meter) -> None:
    environment = kind()

    scores, told = scored(environment)

    assert scores == serially(kind())
    assert meter.most > 1
    assert told == []
    assert environment.count == len(environment.log)
    if kind is SharedCache:
        assert len(environment.cache) == EPISODES


# -- what the source does not show


def without_source(body: str) -> Any:
    names: dict[str, Any] = {"Rows": Rows, "wait": wait}
    lines = "\n        ".join(body.splitlines())
    exec(
        f"class Hidden(Rows):\n    def score_episode(self, model, tokenizer, completion, case_idx):\n        {lines}",
        names,
    )
    return names["Hidden"]()


@pytest.mark.parametrize(
    "body",
    [
        "self.case = case_idx\nwait()\nreturn float(self.case == case_idx)",
        "self.case = case_idx\nwait()\nright = float(self.case == case_idx)\nself.case = None\nreturn right",
        "self.__dict__['case'] = case_idx\nwait()\nreturn float(self.case == case_idx)",
        "self.cache['case'] = case_idx\nwait()\nreturn float(self.cache['case'] == case_idx)",
        "self.count += 1\nwait()\nreturn 1.0 / self.count",
    ],
)
def test_without_source_the_first_batch_shows_what_calls_write(body: str, meter: Meter) -> None:
    scores, told = scored(without_source(body), batches=2)

    assert scores == serially(without_source(body), batches=2)
    assert meter.most == 1
    assert len(told) == 1
    assert "its source does not show where" in told[0]


def test_without_source_calls_that_write_nothing_run_at_the_same_time_from_the_second_batch_on(meter: Meter) -> None:
    scores, told = scored(without_source("wait()\nreturn case_idx / 100"), batches=2)

    assert scores == [number / 100 for number in range(EPISODES)] * 2
    assert meter.most > 1
    assert told == []


def test_a_write_that_shows_later_has_its_batch_scored_again(meter: Meter) -> None:
    body = "if self.log:\n    self.case = case_idx\nwait()\nreturn float(not self.log or self.case == case_idx)"
    environment = without_source(body)
    told: list[str] = []
    cases = [Case(number, "?", {"prompt": "?"}) for number in range(EPISODES)]
    found = []
    with closing(EnvRunner(environment, TrainConfig(), notify=told.append)) as runner:
        runner.offer("a model", "a tokenizer")
        for number in range(3):
            plays = runner_calls.open_sessions(runner, cases, range(EPISODES))
            found.append(
                [one.score for one in runner_calls.score(runner, plays, [Transcript(case, "") for case in cases])]
            )
            runner_calls.end(runner, plays)
            if number == 0:
                environment.log.append("from here on")

    assert found == [[1.0] * EPISODES] * 3
    assert len(told) == 1
    assert "This batch is scored again." in told[0]


def test_attributes_are_set_as_ever_after_a_batch_was_watched() -> None:
    environment = NoState()

    scored(environment)

    assert "__setattr__" not in vars(NoState)
    environment.case = 5
    assert environment.case == 5


# -- episodes


class Plays(Rows):
    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        self.case = case_idx
        reply = yield None
        return float(self.case == case_idx and reply == str(case_idx))


class StartsItself(Rows):
    def start(self, case_idx: int) -> StartsItself:
        self.case = case_idx
        self.log = []
        return self

    def step(self, reply: str) -> None:
        self.log.append(reply)

    def score(self) -> float:
        return float(self.log == [str(self.case)])


class StartsWithItself(Rows):
    def start(self, case_idx: int) -> Episode:
        return Episode(self, case_idx)


class Episode:
    def __init__(self, environment: Any, case_idx: int) -> None:
        self.environment = environment
        environment.case = case_idx

    def step(self, reply: str) -> None:
        self.reply = reply

    def score(self) -> float:
        return float(self.reply == str(self.environment.case))


class NeverResets(Rows):
    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        reply = yield None
        self.log.append(reply)
        self.count += 1
        return float(self.log == [str(case_idx)] and self.count == 1)


class Moves:
    """A helper that keeps state of its own."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


class PlaysOnAHelper(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.moves = Moves()

    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        reply = yield None
        self.moves.say(reply)
        return float(self.moves.said == [str(case_idx)])


class Basket(Rows):
    def get_tools(self) -> list[Any]:
        return [self.put]

    def put(self, item: str) -> str:
        """Put something into the basket.

        Args:
            item: What.
        """
        self.log.append(item)
        return "done"

    def score_episode(self, case_idx: int) -> float:
        return float(self.log == [str(case_idx)])


def played(environment: Any, isolation: str) -> tuple[list[float | None], list[str]]:
    told: list[str] = []
    cases = [Case(number, [{"role": "user", "content": "?"}], {"prompt": "?"}) for number in range(EPISODES)]
    found: list[float | None] = []
    with closing(start_runner(environment, TrainConfig(rl_env_isolation=isolation, rl_env_workers=EPISODES))) as runner:
        runner.notify = told.append
        for _ in range(2):
            plays = runner_calls.open_sessions(runner, cases, range(EPISODES))
            calls: Sequence[AssistantTurn] = [
                AssistantTurn(
                    str(case.case_idx),
                    (ToolCall("put", {"item": str(case.case_idx)}),) * isinstance(environment, Basket),
                )
                for case in cases
            ]
            runner_calls.respond(runner, plays, calls)
            completions = [Transcript(case, [{"role": "assistant", "content": str(case.case_idx)}]) for case in cases]
            results = runner_calls.score(runner, plays, completions)
            assert [result.failure for result in results] == [None] * EPISODES
            found += [result.score for result in results]
            runner_calls.end(runner, plays)
    return found, told


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("kind", [Plays, StartsItself, StartsWithItself, NeverResets, PlaysOnAHelper, Basket])
def test_an_episode_sees_nothing_that_another_episode_set(kind: Any, isolation: str) -> None:
    environment = kind()

    found, told = played(environment, isolation)

    assert found == [1.0] * EPISODES * 2
    assert (environment.case, environment.log, environment.count) == (None, [], 0)
    assert len(told) <= 1


class SharesUnderALock(Plays):
    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        self.case = case_idx
        reply = yield None
        with self.lock:
            self.count += 1
        return float(self.case == case_idx and reply == str(case_idx))


def test_episodes_share_what_the_environment_guards_with_a_lock() -> None:
    environment = SharesUnderALock()

    found, told = played(environment, "thread")

    assert found == [1.0] * EPISODES * 2
    assert environment.count == EPISODES * 2
    assert "self.case" in told[0]


class Quiet(Rows):
    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        reply = yield None
        return float(reply == str(case_idx))


def test_episodes_that_write_nothing_share_the_environment_without_a_word() -> None:
    found, told = played(Quiet(), "thread")

    assert found == [1.0] * EPISODES * 2
    assert told == []
