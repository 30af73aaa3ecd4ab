"""Environments that keep state on themselves are scored as if their calls ran one after another."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from filelock import FileLock

from aitrain import TrainConfig
from aitrain.environment.call_policy import CallPolicy
from aitrain.environment.contract import Case, Transcript
from aitrain.environment.judges.judge_set import Judge
from aitrain.environment.judges.model_judge import stored_verdict
from aitrain.environment.runner import start_runner
from aitrain.rollout.chat_format import ChatFormat
from aitrain.rollout.episode import Rollout
from aitrain.runs.run_folder import write_text
from tests import runner_calls
from tests.rollout.scripted import Letters, Limits, Scripted, cases, play_with_notes

EPISODES = 12


class Rows:
    def __init__(self) -> None:
        self.case: Any = None
        self.count = 0
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


LOGGER = logging.getLogger(__name__)
"""Holds the meter, which is no state of an environment: loggers are not watched."""


def the_meter() -> Meter:
    return LOGGER.__dict__["meter"]


@pytest.fixture(autouse=True)
def meter() -> Meter:
    LOGGER.__dict__["meter"] = Meter()
    return the_meter()


def wait() -> None:
    """As a slow judge would, or `model.generate`."""
    with the_meter():
        time.sleep(0.005)


def scored(
    environment: Any, batches: int = 1, after_the_first: Callable[[], None] = lambda: None, **options: Any
) -> tuple[list[float | None], list[str]]:
    """The scores of batches of episodes, each of its own case, and what the user was told."""
    told: list[str] = []
    cases = [Case(number, "?", {"prompt": "?"}) for number in range(EPISODES)]
    scores: list[float | None] = []
    with closing(start_runner(environment, TrainConfig(**options))) as runner:
        runner.notify = told.append
        runner.offer("a model", "a tokenizer")
        for number in range(batches):
            plays = runner_calls.open_sessions(runner, cases, range(EPISODES))
            results = runner_calls.score(runner, plays, [Transcript(case, str(case.case_idx)) for case in cases])
            scores += [result.score for result in results]
            runner_calls.end(runner, plays)
            if number == 0:
                after_the_first()
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
        with the_meter():
            await asyncio.sleep(0.005)
        return float(self.case == case_idx)


class Counts(Rows):
    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        self.count += 1
        before = self.count
        wait()
        return 1.0 / before


class SetsAFlag(Rows):
    """To the value that it has already, in most calls, so that memory looks as if it was not written."""

    def __init__(self) -> None:
        super().__init__()
        self.case = False

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        self.case = case_idx == 9
        wait()
        return float(self.case)


class SetsInOneLine(SetsAFlag):
    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        return self.set_flag(case_idx)

    # fmt: off
    def set_flag(self, number: int) -> float: self.case = number == 9; wait(); return float(self.case)  # noqa: E702
    # fmt: on


class SetsWhatItImports(Rows):
    """A module that is not among the global variables of this one."""

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
        from tests.rollout import scripted

        vars(scripted)["case"] = case_idx
        wait()
        return float(vars(scripted)["case"] == case_idx)


@pytest.mark.parametrize(
    "kind",
    [SetsAroundASleep, SetsAsync, SetsAFlag, SetsInOneLine, Counts, SetsWhatItImports],
)
def test_scores_that_may_depend_on_earlier_calls_are_those_of_calls_one_after_another(kind: Any, meter: Meter) -> None:
    environment = kind()

    scores, told = scored(environment, batches=2)

    assert scores == serially(kind(), batches=2)
    assert meter.most == 1
    (note,) = told
    assert "(test_call_policy.py, line " in note
    assert "concurrent = True" in note


def test_in_processes_each_call_has_an_environment_to_itself() -> None:
    assert scored(SetsAroundASleep(), batches=2, rl_env_isolation="process") == ([1.0] * EPISODES * 2, [])


class NoState(Rows):
    def score_episode(self, completion: str, case_idx: int) -> float:
        wait()
        wait()
        return case_idx / EPISODES


class HoldsClients(NoState):
    """What judges hold, which changes in each call, what the first call makes, and what rows were drawn with."""

    def __init__(self) -> None:
        super().__init__()
        self.random, self.decoder = np.random.default_rng(0), json.JSONDecoder()
        self.table = pd.DataFrame({"row": range(EPISODES)})

    @cached_property
    def held(self) -> dict[str, httpx.Client]:
        return {"client": httpx.Client()}

    def score_episode(self, completion: str, case_idx: int) -> float:
        self.held["client"].headers["x"] = completion
        assert self.table["row"].iloc[case_idx] == case_idx == self.table.loc[case_idx, "row"]
        return super().score_episode(completion, case_idx)


class DeclaresThatItMay(Rows):
    concurrent = True

    def score_episode(self, case_idx: int) -> float:
        self.case = case_idx
        wait()
        return case_idx / EPISODES


class WritesNoState(NoState):
    """A lock, a judge's verdict, files of the run and of its own."""

    def score_episode(self, completion: str, case_idx: int) -> float:
        if case_idx < 5:
            with FileLock(f"{FILE}.lock"):
                write_text(FILE.with_suffix(".json"), completion)
            stored_verdict(FILE.with_suffix(".sqlite"), completion, [1.0])
            with tempfile.NamedTemporaryFile("w") as file:
                file.write(completion)
        return super().score_episode(completion, case_idx)


class RunsCode(NoState):
    """The code of an answer, with variables of its own."""

    def score_episode(self, completion: str, case_idx: int) -> float:
        names: dict[str, Any] = {"number": case_idx, "__name__": "answer"}
        file = "<string>" if case_idx % 2 else "answer.py"
        exec(compile("def double():\n    return 2 * number\nfound = double()", file, "exec"), names)
        super().score_episode(completion, case_idx)
        return float(names["found"] / 2 / EPISODES)


@pytest.mark.parametrize("kind", [HoldsClients, DeclaresThatItMay, WritesNoState, RunsCode])
def test_environments_that_change_nothing_or_say_that_they_may_run_at_the_same_time(kind: Any, meter: Meter) -> None:
    environment = kind()

    scores, told = scored(environment)

    assert scores == [number / EPISODES for number in range(EPISODES)]
    assert meter.most > 1
    assert told == []


# -- what is seen late, or hidden


class ChangesInARareBranch(Rows):
    """And leaves nothing of it behind, which a comparison of all calls would show."""

    def score_episode(self, case_idx: int) -> float:
        if self.log:
            self.case = case_idx
        wait()
        score = float(not self.log or self.case == case_idx)
        if self.log:
            self.case = None
        return score


class ChangesOnAKnownLine(Rows):
    def score_episode(self, case_idx: int) -> float:
        _ = self.log and self.cache.update(case=case_idx)
        wait()
        return float(not self.log or self.cache["case"] == case_idx)


class ChangesAnOrderOnAKnownLine(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.cache = {"a": 1, "b": 2}

    def score_episode(self, case_idx: int) -> float:
        _ = self.log and self.cache.update(a=self.cache.pop("a"))
        wait()
        return 1.0


class SeedsInARareBranch(Rows):
    def score_episode(self, case_idx: int) -> float:
        if not self.log:
            return 1.0
        random.seed(case_idx)
        wait()
        return float(random.random() == random.Random(case_idx).random())


class WritesInARareBranch(Rows):
    """A file of a fixed name, as the code of an answer that is run."""

    def score_episode(self, case_idx: int) -> float:
        if not self.log:
            return 1.0
        FILE.write_text(str(case_idx))
        wait()
        return float(FILE.read_text() == str(case_idx))


@pytest.mark.parametrize(
    "kind",
    [
        ChangesInARareBranch,
        ChangesOnAKnownLine,
        ChangesAnOrderOnAKnownLine,
        SeedsInARareBranch,
        WritesInARareBranch,
    ],
)
def test_scores_of_a_batch_that_changed_something_unwatched_are_missing(kind: Any) -> None:
    environment = kind()

    scores, told = scored(environment, batches=3, after_the_first=lambda: environment.log.append("from here on"))

    assert scores == [*[1.0] * EPISODES, *[None] * EPISODES, *[1.0] * EPISODES]
    assert len(told) == 1
    assert "missing data" in told[0]


def test_a_variable_that_is_set_between_two_batches_is_no_change_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(Rows):
        def score_episode(self, case_idx: int) -> float:
            if "AITRAIN_TEST" in os.environ:
                wait()
            return 1.0

    set_variable = partial(monkeypatch.setenv, "AITRAIN_TEST", "1")
    assert scored(Reads(), batches=2, after_the_first=set_variable) == ([1.0] * EPISODES * 2, [])


def test_a_call_that_hangs_while_it_is_watched_does_not_stop_the_others() -> None:
    released = threading.Event()

    class Hangs(Rows):
        def score_episode(self, case_idx: int) -> float:
            if case_idx == 0:
                released.wait()
            return 1.0

    try:
        scores, _ = scored(Hangs(), rl_env_timeout=2.0)
    finally:
        released.set()

    assert scores == [None] + [1.0] * (EPISODES - 1)


# -- episodes


class StartsItself(Rows):
    def start(self, case_idx: int) -> StartsItself:
        self.case = case_idx
        self.log = []
        return self

    def step(self, reply: str) -> None:
        self.log.append(reply)

    def score(self) -> float:
        return float(self.log == [str(self.case)])


class NeverResets(Rows):
    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        reply = yield None
        self.log.append(reply)
        self.count += 1
        return float(self.log == [str(case_idx)] and self.count == 1)


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


class SeedsTheProcess(Rows):
    """What no copy of the environment separates; the line that seeds also draws, as a library's function may."""

    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        random.seed(case_idx), random.random()
        own = random.Random(int((yield None)))
        own.random()
        return float(random.random() == own.random())


class Board(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.board = np.zeros(2)

    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        self.board[0] += 1
        reply = yield None
        return float(self.board.sum() == 1 and reply == str(case_idx))


class KeepsAnObject(Rows):
    """Keeps an object whose class was never copied: Python notes the slots of a class at its first copy. `__getstate__`
    leaves out what a copy for an episode needs."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = type("Kept", (), {})()
        self.kept.log = []

    def __getstate__(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        self.kept.log.append((yield None))
        return float(self.kept.log == [str(case_idx)] and self.count == 0)


KNOWN: dict[str, Any] = {}


class ReachesPastItsCopies(Rows):
    def __init__(self) -> None:
        super().__init__()
        KNOWN["environment"] = self

    def episode(self, case_idx: int) -> Generator[Any, str, float]:
        log = KNOWN["environment"].log
        log.append(case_idx)
        yield None
        return float(log.pop() == case_idx and not log)


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize(
    "kind", [StartsItself, NeverResets, Basket, SeedsTheProcess, Board, KeepsAnObject, ReachesPastItsCopies]
)
def test_an_episode_sees_nothing_that_another_episode_set(kind: Any, isolation: str) -> None:
    environment = kind()

    def answer(so_far: str) -> str:
        number = so_far.removeprefix("u:").partition("?")[0]
        call = f'<tool_call>{{"name": "put", "arguments": {{"item": "{number}"}}}}</tool_call>'
        return f"{number if kind is not Basket or 'done' in so_far else call}$"

    settings = {"rl_env_isolation": isolation, "rl_env_workers": EPISODES}
    episodes, told = play_with_notes(environment, Scripted(answer), Limits(2, 99), cases(EPISODES), **settings)

    assert [(episode.result.score, episode.failure_message) for episode in episodes] == [(1.0, "")] * EPISODES
    assert (environment.case, environment.log, environment.count) == (None, [], 0)
    assert len(told) <= 2


def test_what_cannot_be_put_back_as_it_was_before_the_first_episode_is_not_copied() -> None:
    class Draws(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.random = random.Random(0)

        def episode(self) -> Generator[Any, str, float]:
            drawn = self.random.random()
            yield None
            return drawn

    episodes, (note,) = play_with_notes(Draws(), Scripted(lambda _: "x$"), Limits(2, 99), cases(EPISODES))
    drawn = random.Random(0)
    assert [episode.result.score for episode in episodes] == [drawn.random() for _ in range(EPISODES)]
    assert "an object of type Random cannot be put back" in note


def test_what_a_later_batch_shows_is_copied_as_it_was_before_that() -> None:
    class Forks(Rows):
        def episode(self, case_idx: int) -> Generator[Any, str, float]:
            self.log.append(case_idx)
            if case_idx > 5:
                self.cache[case_idx] = True
            yield None
            return float(self.log == [case_idx] and [*self.cache] == [case_idx] * (case_idx > 5))

    runner = start_runner(Forks(), TrainConfig(rl_max_turns=2))
    rollout = Rollout(runner, Scripted(lambda _: "x$"), ChatFormat(Letters()), None)

    def scores(of: Sequence[Case]) -> list[float | None]:
        return [one.result.score for one in asyncio.run(rollout.play(of, range(len(of)), range(len(of))))]

    with closing(runner):
        assert [scores(cases(12)[first : first + 4]) for first in (0, 4, 8)] == [[1.0] * 4, [None] * 4, [1.0] * 4]


def test_a_seed_that_another_thread_sets_is_no_change_of_a_call() -> None:
    over = threading.Event()

    def seeds() -> None:  # as an engine in this process does
        for number in itertools.count():
            if over.wait(0.001):
                return
            torch.manual_seed(number)

    engine = threading.Thread(target=seeds)
    engine.start()
    try:
        _, notices = scored(NoState(), batches=3)
    finally:
        over.set()
        engine.join()
    assert notices == []


# -- state in helper objects, arrays, classes, modules and closures


class Game:
    def __init__(self) -> None:
        self.board = 0

    def begin(self, number: int) -> Game:
        self.board = number
        return self


class Registry:
    current: Any = None

    @classmethod
    def put(cls, value: Any) -> None:
        cls.current = value


class Holds(Rows):
    """What the environments below hold."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor = torch.zeros(2)
        self.table = pd.DataFrame({"n": [0, 0]})
        self.judge = Judge("own", Game().begin)
        box: dict[str, int] = {}
        self.get = lambda: box["n"]
        self.fill = _filling(box)
        self.cached = functools.lru_cache(lambda: {"n": 0})


def _filling(box: dict[str, int]) -> Any:
    def fill(number: int) -> None:
        box["n"] = number

    return fill


FILE = Path(tempfile.gettempdir()) / f"aitrain-answer-{os.getpid()}"
STATEFUL = {
    "data of a tensor, which counts no version": ("env.tensor.data.fill_(n)", "float(env.tensor[0])"),
    "a table": ("env.table.loc[0, 'n'] = n", "int(env.table.loc[0, 'n'])"),
    "a new column": ("env.table[str(n)] = n", "int(env.table.iloc[0, -1])"),
    "closure": ("env.fill(n)", "env.get()"),
    "a judge": ("env.judge.function(n)", "env.judge.function.__self__.board"),
    "another class": ("Registry.put(n)", "Registry.current"),
    "the working directory": (
        "before = os.getcwd(); os.chdir(tempfile.mkdtemp()); Path('answer').write_text(text)",
        "(int(Path('answer').read_text()), os.chdir(before))[0]",
    ),
    "os.environ": ('os.environ["AITRAIN_TEST"] = str(n)', 'int(os.environ["AITRAIN_TEST"])'),
    "a file that a thread of the call writes": (
        "thread = threading.Thread(target=FILE.write_text, args=[str(n)]); thread.start(); thread.join()",
        "int(FILE.read_text())",
    ),
    "a file that is appended": ("FILE.open('a').write(f' {n}')", "int(FILE.read_text().split()[-1])"),
    "a file that takes the name of another": (
        "own = FILE.with_suffix(f'.{n}'); own.write_text(str(n)); own.replace(FILE)", "int(FILE.read_text())"
    ),
    "a folder that is removed, made again and filled by a program": (
        "import shutil, subprocess; shutil.rmtree(f'{FILE}.d', ignore_errors=True);"
        " subprocess.run(['mkdir', '-p', f'{FILE}.d/{n}'])",
        "int(max(os.listdir(f'{FILE}.d'), key=int))",
    ),
    "a dict in a cache": ("env.cached()['n'] = n", "env.cached()['n']"),
    "a database": (
        "import sqlite3; sqlite3.connect(f'{FILE}.db').executescript(f'drop table if exists t;"
        " create table t as select {n} as n')",
        "sqlite3.connect(f'{FILE}.db').execute('select n from t').fetchone()[0]",
    ),
}  # fmt: skip
"""What a call writes, and what it reads after a wait."""


def environment_of(folder: Path, lines: list[str]) -> Any:
    """An environment with this body, whose source can be read."""
    head = "class Written(Holds):\n    def score_episode(env, model, tokenizer, completion, case_idx):\n"
    text = head + "".join(f"        {line}\n" for line in ["n, text = case_idx, completion", *lines])
    file = folder / "written.py"
    file.write_text(text)
    names = {**globals(), "random": random, "__name__": f"written_{folder.name}"}
    exec(compile(text, str(file), "exec"), names)
    return names["Written"]


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.slow
def test_state_anywhere_in_memory_gives_the_scores_of_calls_one_after_another(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITRAIN_TEST", "0")
    write, read = STATEFUL[name]
    kind = environment_of(tmp_path, [write, "wait()", f"return ({read}) / 100"])

    assert scored(kind(), batches=2)[0] == serially(kind(), batches=2)


def test_calls_of_two_environments_that_run_alone_at_once_leave_no_trace_function_for_threads() -> None:
    first, second = (CallPolicy(NoState(), by_episode=False, is_watched=True, notify=print) for _ in range(2))
    for policy in (first, second):
        policy.run(lambda: None)  # the first call is not watched
    second_runs, first_is_over = threading.Event(), threading.Event()

    def call_second() -> None:
        second.run(lambda: (second_runs.set(), first_is_over.wait(60)))

    other = threading.Thread(target=call_second)

    def call_first() -> None:
        first.run(lambda: (other.start(), second_runs.wait(60)))
        first_is_over.set()

    one = threading.Thread(target=call_first)
    one.start()
    one.join(60)
    other.join(60)
    assert threading.gettrace() is None
