"""What an environment's calls write, read from its source: attributes of one call, values that go from call to call,
writes under the environment's own lock, and what cannot be told."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aitrain.environment.contract import env_kind
from aitrain.environment.locator import bundled_modules
from aitrain.environment.state_analysis import analyze_state
from aitrain.environment.state_report import StateReport

COUNT = 0
SEEN: dict[Any, Any] = {}


def found(environment: Any) -> StateReport:
    return analyze_state(environment, env_kind(environment))


def judge(text: str, answer: str) -> float:
    return float(text == answer)


def remember(owner: Any, value: Any) -> None:
    owner.case = value


def push(items: list[Any], value: Any) -> None:
    items.append(value)


def counted(method: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(method)
    def wrapper(self: Any, *arguments: Any, **keywords: Any) -> float:
        self.calls += 1
        return method(self, *arguments, **keywords)

    return wrapper


class Game:
    def __init__(self) -> None:
        self.moves: list[str] = []

    def reset(self) -> None:
        self.moves = []

    def play(self, move: str) -> int:
        self.moves.append(move)
        return len(self.moves)

    def look(self) -> int:
        return len(self.moves)


class Base:
    """What the environments below share."""

    kinds: dict[str, int] = {}  # noqa: RUF012
    total = 0

    def __init__(self) -> None:
        self.case: Any = None
        self.calls = 0
        self.cache: dict[Any, Any] = {}
        self.log: list[Any] = []
        self.rows = [{"answer": "a"}]
        self.lock, self.alock = threading.Lock(), asyncio.Lock()
        self.gate = threading.Semaphore(8)
        self.local = threading.local()
        self.rng, self.numbers = random.Random(0), itertools.count()
        self.game = Game()
        self.per_case: dict[Any, list[Any]] = defaultdict(list)
        self.judge = judge
        self.threshold = 0.5
        self.handlers = {"note": self.note}

    def note(self, value: Any) -> None:
        self.case = value

    def solve(self, number: Any) -> str:
        return self.rows[0]["answer"] * int(number)

    @property
    def current(self) -> Any:
        return self.case

    @current.setter
    def current(self, value: Any) -> None:
        self.case = value


# -- nothing is written


class Stateless(Base):
    def score_episode(self, completion: str, case_idx: int, answer: str) -> float:
        text = completion.strip()
        words = [word for word in text.split() if word]
        best = max((judge(word, answer) for word in words), default=0.0)
        row = dict(self.rows[case_idx % 1])
        row["text"] = text
        history = list(self.log)
        history.append(text)
        return self.judge(text, answer) + best * self.threshold + self.game.look() + len(history)


class OnlyLocals(Base):
    async def score_episode(self, text: str) -> float:
        steps = []

        def add(step: str) -> None:
            steps.append(step)

        add(text)
        await asyncio.sleep(0)
        return float(len(steps))


class FillsALog(Base):
    def score_episode(self, text: str, case_idx: int) -> float:
        self.log.append(text)
        self.per_case[case_idx].append(text)
        self.last = text
        return 1.0


class FillsACache(Base):
    def score_episode(self, text: str, case_idx: int) -> float:
        if case_idx not in self.cache:
            self.cache[case_idx] = self.solve(case_idx)
        return judge(text, self.cache[case_idx])


class FillsACacheByAnswer(Base):
    def score_episode(self, completion: str, answer: str) -> float:
        key = (completion.strip(), answer)
        try:
            return float(self.cache[key])
        except KeyError:
            value = judge(key[0], answer)
            self.cache[key] = value
            return value


class FillsACacheWithAnEarlyReturn(Base):
    def score_episode(self, completion: str, case_idx: int, answer: str) -> float:
        if not completion:
            return 0.0
        expected = self.cache.setdefault(case_idx, answer.lower())
        return judge(completion, expected)


class CachesByADigest(Base):
    def score_episode(self, completion: str, answer: str) -> float:
        key = hashlib.sha256(f"{completion}-{answer}".encode()).hexdigest()
        value = self.cache.get(key)
        if value is None:
            value = judge(completion, answer)
            self.cache[key] = value
        return float(value)


class CountsUnderALock(Base):
    def score_episode(self, text: str) -> float:
        with self.lock:
            self.calls += 1
        return 1.0


class AcquiresAndReleases(Base):
    def score_episode(self, text: str) -> float:
        self.lock.acquire()
        try:
            self.calls += 1
        finally:
            self.lock.release()
        return 1.0


class CountsUnderALockOfAsyncio(Base):
    async def score_episode(self, text: str) -> float:
        async with self.alock:
            self.calls += 1
        return 1.0


class ThreadLocal(Base):
    def score_episode(self, text: str) -> float:
        self.local.case = text
        time.sleep(0)
        return float(self.local.case == text)


class MakesAClientWhenItNeedsOne(Base):
    def score_episode(self, text: str) -> float:
        if self.case is None:
            self.case = Game()
        if not hasattr(self, "tokens"):
            self.tokens = {"a": 1}
        return float(self.case.look() + len(self.tokens))


@pytest.mark.parametrize(
    "kind",
    [
        MakesAClientWhenItNeedsOne, Stateless, OnlyLocals, CachesByADigest,
        FillsALog, FillsACache, FillsACacheByAnswer, FillsACacheWithAnEarlyReturn,
        CountsUnderALock, AcquiresAndReleases, CountsUnderALockOfAsyncio, ThreadLocal,
    ],
)  # fmt: skip
def test_calls_that_may_run_at_the_same_time_are_recognized(kind: Callable[[], Any]) -> None:
    report = found(kind())

    assert (report.scratch, report.carried, report.unclear) == ({}, {}, None)


# -- attributes of one call


class Sets(Base):
    def score_episode(self, text: str) -> float:
        self.case = text
        time.sleep(0)
        return float(self.case == text)


class SetsInAHelper(Base):
    def score_episode(self, text: str) -> float:
        self.note(text)
        return self._compare(text)

    def _compare(self, text: str) -> float:
        return float(self.case == text)


class SetsThroughAProperty(Base):
    def score_episode(self, text: str) -> float:
        self.current = text
        return float(self.current == text)


class SetsByAnAlias(Base):
    def score_episode(self, text: str) -> float:
        me = self
        me.case = text
        return float(me.case == text)


class SetsByName(Base):
    def score_episode(self, text: str) -> float:
        setattr(self, "case", text)  # noqa: B010
        return float(getattr(self, "case") == text)  # noqa: B009


class SetsInTheDict(Base):
    def score_episode(self, text: str) -> float:
        self.__dict__["case"] = text
        return float(self.case == text)


class SetsInAFunction(Base):
    def score_episode(self, text: str) -> float:
        remember(self, text)
        return float(self.case == text)


class SetsInBothBranches(Base):
    def score_episode(self, text: str) -> float:
        if text:
            self.case = 1
        else:
            self.case = 0
        return float(self.case)


class SetsAndFills(Base):
    def score_episode(self, text: str) -> float:
        self.steps: list[str] = []
        for word in text.split():
            self.steps.append(word)
        return float(len(self.steps))


class SetsUnderALockAndReadsLater(Base):
    def score_episode(self, text: str) -> float:
        with self.lock:
            self.case = text
        time.sleep(0)
        return float(self.case == text)


class SetsInACallback(Base):
    async def score_episode(self, text: str) -> float:
        self.case = text
        return await asyncio.to_thread(self._compare, text)

    def _compare(self, text: str) -> float:
        return float(self.case == text)


class SetsInTheBase(Sets):
    def score_episode(self, text: str) -> float:
        return super().score_episode(text)


class SetsInATry(Base):
    def score_episode(self, text: str) -> float:
        try:
            self.case = float(text)
        except ValueError:
            return 0.0
        finally:
            time.sleep(0)
        return float(self.case)


class SetsTwoAtOnce(Base):
    def score_episode(self, text: str) -> float:
        self.case, self.calls = text, 0
        while self.calls < 3:
            self.calls += 1
        return float(self.case == text)


class SetsInAnEpisode(Base):
    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        self.case = case_idx
        reply = yield None
        return float(reply == str(self.case))


class SetsInStart(Base):
    def start(self, case_idx: int) -> SetsInStart:
        self.case, self.log = case_idx, []
        return self

    def step(self, reply: str) -> None:
        self.log.append(reply)

    def score(self) -> float:
        return float(self.case in self.log)


class ToolsOfAnEpisode(Base):
    def get_tools(self) -> list[Any]:
        return [self.buy]

    def buy(self, item: str) -> str:
        """Buy."""
        self.log.append(item)
        return "bought"

    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        self.log = []
        yield None
        return float(len(self.log))


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Sets, {"self.case"}), (SetsInAHelper, {"self.case"}), (SetsThroughAProperty, {"self.case"}),
        (SetsByAnAlias, {"self.case"}), (SetsByName, {"self.case"}), (SetsInTheDict, {"self.case"}),
        (SetsInAFunction, {"self.case"}), (SetsInBothBranches, {"self.case"}), (SetsAndFills, {"self.steps"}),
        (SetsUnderALockAndReadsLater, {"self.case"}), (SetsInACallback, {"self.case"}),
        (SetsInTheBase, {"self.case"}), (SetsInATry, {"self.case"}), (SetsTwoAtOnce, {"self.case", "self.calls"}),
        (SetsInAnEpisode, {"self.case"}), (SetsInStart, {"self.case", "self.log"}), (ToolsOfAnEpisode, {"self.log"}),
    ],
)  # fmt: skip
def test_attributes_that_each_call_sets_before_it_reads_them_are_recognized(
    kind: Callable[[], Any], names: set[str]
) -> None:
    report = found(kind())

    assert set(report.scratch) == names
    assert (report.carried, report.unclear) == ({}, None)


def test_the_place_of_a_write_is_told() -> None:
    place = found(SetsInAHelper()).scratch["self.case"]

    assert (place.target, place.function, place.file) == ("self.case", "Base.note", __file__)
    assert "self.case = value" in open(__file__).read().splitlines()[place.line - 1]  # noqa: SIM115


# -- values that go from call to call


def carried(body: Callable[..., Any]) -> Any:
    return type("Carries", (Base,), {"score_episode": body})()


class Counts(Base):
    def score_episode(self, text: str) -> float:
        self.calls += 1
        return 1.0 / self.calls


class CountsInADecorator(Base):
    @counted
    def score_episode(self, text: str) -> float:
        return 1.0


class RunningBest(Base):
    def score_episode(self, text: str) -> float:
        before = getattr(self, "best", 0.0)
        self.best = max(before, float(len(text)))
        return float(self.best > before)


class FirstWins(Base):
    def score_episode(self, text: str, case_idx: int) -> float:
        if case_idx not in self.cache:
            self.cache[case_idx] = text
        return float(self.cache[case_idx] == text)


class ByALossyKey(Base):
    def score_episode(self, text: str) -> float:
        if len(text) not in self.cache:
            self.cache[len(text)] = text
        return float(self.cache[len(text)] == text)


class Novelty(Base):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def score_episode(self, text: str) -> float:
        is_new = text not in self.seen
        self.seen.add(text)
        return float(is_new)


class SolvedBefore(Base):
    def score_episode(self, text: str, case_idx: int, answer: str) -> float:
        if text == answer:
            self.cache[case_idx] = True
        return float(case_idx in self.cache)


class SolvedBeforeByReturn(Base):
    def score_episode(self, text: str, case_idx: int, answer: str) -> float:
        if text != answer:
            return float(case_idx in self.cache)
        self.cache[case_idx] = True
        return 1.0


class NoveltyByADict(Base):
    def score_episode(self, text: str) -> float:
        is_new = text not in self.cache
        self.cache[text] = len(text)
        return float(is_new)


class BestOfAll(Base):
    def score_episode(self, text: str) -> float:
        self.cache[text] = len(text)
        return float(len(text) == max(self.cache.values()))


class CountsInSteps(Base):
    def score_episode(self, text: str) -> float:
        count = self.cache.get(text, 0)
        self.cache[text] = count + 1
        return 1.0 / (1 + count)


class LastOfTheLoop(Base):
    def score_episode(self, text: str, case_idx: int) -> float:
        value = "none"
        for word in text.split():
            if case_idx not in self.cache:
                self.cache[case_idx] = value
            value = word
        return float(self.cache.get(case_idx) == text)


class CountsInADict(Base):
    def score_episode(self, text: str, case_idx: int) -> float:
        self.cache[case_idx] = self.cache.get(case_idx, 0) + 1
        return 1.0 / self.cache[case_idx]


class AddsToAnItem(Base):
    def score_episode(self, case_idx: int) -> float:
        self.cache[case_idx] += 1
        return 1.0


class KeepsByCase(Base):
    def score_episode(self, text: str, case_idx: int) -> float:
        self.cache[case_idx] = text
        time.sleep(0)
        return float(self.cache[case_idx] == text)


class ChangesARow(Base):
    def score_episode(self, text: str) -> float:
        row = self.rows[0]
        row["text"] = text
        return float(row["text"] == text)


class ChangesARowThatItSet(Base):
    def score_episode(self, text: str) -> float:
        self.row = self.rows[0]
        self.row["text"] = text
        return float(self.row["text"] == text)


class ChangesRowsInALoop(Base):
    def score_episode(self, text: str) -> float:
        for row in self.rows:
            row["text"] = text
        return float(self.rows[0]["text"] == text)


class UsesAGame(Base):
    def score_episode(self, text: str) -> float:
        self.game.reset()
        time.sleep(0)
        return 1.0 / self.game.play(text)


class HandsAList(Base):
    def score_episode(self, text: str) -> float:
        push(self.log, text)
        return float(self.log[-1] == text)


class Draws(Base):
    def score_episode(self, text: str) -> float:
        return self.rng.random()


class Numbers(Base):
    def score_episode(self, text: str) -> float:
        return 1.0 / (1 + next(self.numbers))


class Shuffles(Base):
    def score_episode(self, text: str) -> float:
        random.shuffle(self.log)
        return float(self.log[:1] == [text])


class OfTheClass(Base):
    def score_episode(self, text: str) -> float:
        type(self).total += 1
        return 1.0 / OfTheClass.total


class SetsOnTheClass(Base):
    def score_episode(self, text: str) -> float:
        SetsOnTheClass.total = len(text)
        time.sleep(0)
        return 1.0 / SetsOnTheClass.total


class Global(Base):
    def score_episode(self, text: str) -> float:
        global COUNT
        COUNT = len(text)
        time.sleep(0)
        return 1.0 / COUNT


class GlobalDict(Base):
    def score_episode(self, text: str) -> float:
        SEEN["case"] = text
        time.sleep(0)
        return float(SEEN["case"] == text)


class LocksOnlyTheWrite(Base):
    def score_episode(self, text: str) -> float:
        with self.lock:
            self.calls += 1
        return 1.0 / self.calls


class BehindASemaphoreOfEight(Base):
    def score_episode(self, text: str) -> float:
        with self.gate:
            self.calls += 1
        return 1.0


class SetsInOneBranch(Base):
    def score_episode(self, text: str) -> float:
        if text:
            self.case = text
        return float(self.case == text)


class SetsInALoop(Base):
    def score_episode(self, text: str) -> float:
        for word in text.split():
            self.case = word
        return float(self.case == text)


class FirstCall(Base):
    def score_episode(self, text: str) -> float:
        if self.case is None:
            self.case = object()
            return 1.0
        return 0.0


class MakesASimulatorWhenItNeedsOne(Base):
    def score_episode(self, text: str) -> float:
        if self.case is None:
            self.case = Game()
        self.case.reset()
        time.sleep(0)
        return float(self.case.play(text))


class Deletes(Base):
    def score_episode(self, text: str) -> float:
        del self.case
        return 1.0


class SetsAComputedName(Base):
    def score_episode(self, text: str) -> float:
        setattr(self, "case_" + text, 1)
        return float(getattr(self, "case_" + text))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Counts, "self.calls"), (CountsInADecorator, "self.calls"), (RunningBest, "self.best"),
        (FirstWins, "self.cache"), (ByALossyKey, "self.cache"), (Novelty, "self.seen"), (SolvedBefore, "self.cache"),
        (SolvedBeforeByReturn, "self.cache"), (CountsInADict, "self.cache"),
        (CountsInSteps, "self.cache"),
        (LastOfTheLoop, "self.cache"), (NoveltyByADict, "self.cache"), (BestOfAll, "self.cache"),
        (AddsToAnItem, "self.cache"),
        (KeepsByCase, "self.cache"), (ChangesARow, "self.rows"), (ChangesARowThatItSet, "self.rows"),
        (ChangesRowsInALoop, "self.rows"), (UsesAGame, "self.game.moves"), (HandsAList, "self.log"),
        (Draws, "self.rng"),
        (Numbers, "self.numbers"), (Shuffles, "self.log"), (OfTheClass, "OfTheClass.total"),
        (SetsOnTheClass, "SetsOnTheClass.total"), (Global, "COUNT"), (GlobalDict, "SEEN"),
        (LocksOnlyTheWrite, "self.calls"), (BehindASemaphoreOfEight, "self.calls"), (SetsInOneBranch, "self.case"),
        (SetsInALoop, "self.case"), (Deletes, "self.case"), (SetsAComputedName, "self.?"),
        (FirstCall, "self.case"), (MakesASimulatorWhenItNeedsOne, "self.case.moves"),
    ],
)  # fmt: skip
def test_values_that_go_from_call_to_call_are_recognized(kind: Callable[[], Any], name: str) -> None:
    assert set(found(kind()).carried) == {name}


# -- what the source does not show


class HandsItselfOn(Base):
    def score_episode(self, text: str) -> float:
        return float(asyncio.iscoroutine(self) or functools.partial(text.__class__, self) is None)


class StoresItself(Base):
    def score_episode(self, text: str) -> float:
        held = [self]
        return float(len(held))


class CallsByAHandler(Base):
    def score_episode(self, text: str) -> float:
        self.handlers["note"](text)
        return float(self.case == text)


class CallsByAComputedName(Base):
    def score_episode(self, text: str) -> float:
        getattr(self, "no" + "te")(text)
        return float(self.case == text)


@contextmanager
def borrowed(owner: Any) -> Any:
    owner.case = 1
    yield owner


class BorrowsItself(Base):
    def score_episode(self, text: str) -> float:
        with borrowed(self):
            return float(self.case)


def without_source() -> Any:
    names: dict[str, Any] = {"Base": Base}
    exec("class Exec(Base):\n    def score_episode(self, text):\n        return 1.0", names)
    return names["Exec"]()


@pytest.mark.parametrize("make", [HandsItselfOn, StoresItself, without_source])
def test_what_the_source_does_not_show_is_unclear(make: Callable[[], Any]) -> None:
    assert found(make()).unclear is not None


@pytest.mark.parametrize("make", [CallsByAHandler, CallsByAComputedName, BorrowsItself])
def test_hidden_ways_to_write_are_never_taken_for_none(make: Callable[[], Any]) -> None:
    report = found(make())

    assert report.unclear is not None or report.carried or report.scratch


def test_the_bundled_environments_write_nothing_that_calls_share(tmp_path: Path) -> None:
    from aitrain import TrainConfig
    from aitrain.environment.loader import load_env
    from aitrain.environment.locator import find_env

    data = tmp_path / "train.jsonl"
    data.write_text(
        '{"prompt": [{"role": "user", "content": "?"}], "data_source": "openai/gsm8k",'
        ' "reward_model": {"ground_truth": "2"}}'
    )
    for module in bundled_modules():
        keywords = {"data_path": str(data)} if module.endswith("gsm8k") else {}
        environment = load_env(find_env(TrainConfig(rl_env=module)), keywords)
        report = found(environment)
        assert (report.scratch, report.carried, report.unclear) == ({}, {}, None), module
