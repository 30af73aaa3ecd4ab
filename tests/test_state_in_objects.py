"""State that calls keep in helper objects, arrays, classes, modules and closures is scored as if calls ran one after
another, and common patterns without such state run at the same time."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import random
import sqlite3
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from tests import test_call_policy as here
from tests.test_call_policy import Meter, Rows, scored, serially, the_meter, wait

meter = here.meter

CURRENT: Any = None
CLIENT: Any = None
LIMITS = {str(number): number for number in range(100)}
LOGGER = logging.getLogger(__name__)
MODULES = {"random": random, "numpy.random": np.random}


DATASET = datasets.Dataset.from_list([{"answer": number} for number in range(100)])


def set_current(value: Any) -> None:
    global CURRENT
    CURRENT = value


def current() -> Any:
    return CURRENT


class Game:
    def __init__(self) -> None:
        self.board = 0

    def begin(self, number: int) -> Game:
        self.board = number
        return self

    def value(self) -> int:
        return self.board


class Registry:
    current: Any = None
    client: Any = None

    @classmethod
    def put(cls, value: Any) -> None:
        cls.current = value

    @classmethod
    def judge(cls) -> Judge:
        if cls.client is None:
            cls.client = Judge()
        return cls.client


class Judge:
    def __init__(self) -> None:
        self.session: Any = None
        self.cache: dict[str, float] = {}
        self.lock, self.calls = threading.Lock(), 0

    def solve(self, text: str) -> float:
        if self.session is None:
            self.session = io.StringIO()
        if text not in self.cache:
            self.cache[text] = int(text) / 100
        return self.cache[text]

    def score(self, text: str) -> float:
        wait()
        with self.lock:
            self.calls += 1
        return self.solve(text)

    @functools.cached_property
    def table(self) -> dict[str, int]:
        return dict(LIMITS)


def judge() -> Judge:
    global CLIENT
    if CLIENT is None:
        CLIENT = Judge()
    return CLIENT


@functools.lru_cache
def the_game() -> Game:
    return Game()


def kept(number: int, box: list[int] = []) -> int:  # noqa: B006
    box.append(number)
    wait()
    return box[-1]


class Viewer:
    def __init__(self, environment: Any) -> None:
        self.environment = environment

    def score(self) -> float:
        return self.environment.case / 100


class Holds(Rows):
    """What the environments below hold."""

    of_class: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.array, self.tensor, self.buffer = np.zeros((2, 2)), torch.zeros(2), io.StringIO()
        self.games, self.game = [Game(), Game()], Game()
        self.by_name = {"main": self.game}
        self.other_log = self.log
        self.viewer = Viewer(self)
        self.put_case = lambda number: setattr(self, "case", number)
        self.judge, self.told = Judge(), False
        self.vectors, self.weights = np.ones((100, 2)), {"a": [0.5]}
        self.made: Any = None
        self.by_number, self.board = {1: 2.0}, [[0, 0], [0, 0]]
        self.dataset = DATASET
        box: dict[str, int] = {}
        self.put, self.get = functools.partial(box.__setitem__, "n"), lambda: box["n"]
        self.fill = _filling(box)

    @property
    def lazy(self) -> Game:
        if self.made is None:
            self.made = Game()
        return self.made

    @functools.cached_property
    def cached(self) -> Game:
        return Game()


class HoldsADatabase(Holds):
    def __init__(self) -> None:
        super().__init__()
        self.database = sqlite3.connect(":memory:", check_same_thread=False)
        self.database.execute("create table t (n int)")


def _filling(box: dict[str, int]) -> Any:
    def fill(number: int) -> None:
        box["n"] = number

    return fill


STATEFUL = {
    "fill": ("env.array.fill(n)", "env.array[0, 0]"),
    "copyto": ("np.copyto(env.array, n)", "env.array[0, 0]"),
    "out": ("np.add(0, n, out=env.array)", "env.array[0, 0]"),
    "augmented": ("a = env.array; a *= 0; a += n", "env.array[0, 0]"),
    "view": ("a = env.array.reshape(-1); a[:] = n", "env.array[0, 0]"),
    "tensor": ("env.tensor.zero_().add_(n)", "float(env.tensor[0])"),
    "buffer": ("env.buffer.seek(0); env.buffer.truncate(0); env.buffer.write(str(n))", "int(env.buffer.getvalue())"),
    "closure": ("env.fill(n)", "env.get()"),
    "lambda": ("env.put_case(n)", "env.case"),
    "objects in a list": ("for game in env.games: game.begin(n)", "env.games[0].value()"),
    "an object by two names": ('env.by_name["main"].begin(n)', "env.game.value()"),
    "a list by two names": ("env.log.append(n)", "env.other_log[-1]"),
    "chained": ("game = env.game.begin(n)", "game.value()"),
    "made when needed": ("env.lazy.begin(n)", "env.lazy.value()"),
    "cached property": ("env.cached.begin(n)", "env.cached.value()"),
    "cached function": ("the_game().begin(n)", "the_game().value()"),
    "another class": ("Registry.put(n)", "Registry.current"),
    "its own class": ("env.__class__.of_class = n", "env.of_class"),
    "a module": ("here.current = n", "here.current"),
    "a function": ("judge.current = n", "judge.current"),
    "a global set elsewhere": ("set_current(n)", "current()"),
    "os.environ": ('os.environ["AITRAIN_TEST"] = str(n)', 'int(os.environ["AITRAIN_TEST"])'),
    "database": ('env.database.execute("delete from t"); env.database.execute("insert into t values (?)", (n,))',
                 'env.database.execute("select n from t").fetchone()[0]'),
    "random.seed": ("random.seed(n)", "random.random()"),
    "numpy.random.seed": ("np.random.seed(n)", "float(np.random.rand())"),
    "torch.manual_seed": ("torch.manual_seed(n)", "float(torch.rand(1))"),
    "torch.default_generator": ("torch.default_generator.manual_seed(n)", "float(torch.rand(1))"),
    "a helper that sees the environment": ("env.case = n", "env.viewer.score()"),
}  # fmt: skip
"""What a call writes, and what it reads after a wait."""

STATELESS = {
    "cached property of a helper": "wait() or env.judge.table[text]",
    "vectors": "wait() or normalized(env.vectors[n])",
    "a weight is added to": "wait() or added(env)",
    "module random": "wait() or float(random.random() < 2)",
    "logger and global table": "wait() or logged(text)",
    "context manager": "measured(n)",
    "an item of a copied dict is added to": "wait() or weighted(env)",
    "rows of a board are copied by slices": "wait() or boarded(env, n)",
    "a row of a dataset gets a column": "wait() or extended(env, n)",
}


def normalized(vector: Any) -> float:
    length = vector.sum()
    length += 1
    other = vector / length
    other += 1
    return float(other[0])


def added(env: Holds) -> float:
    total = env.weights["a"][0]
    total += 1.0
    return total


def logged(text: str) -> float:
    LOGGER.debug("scoring %s", text)
    return LIMITS.get(text, 0) / 100


def weighted(env: Holds) -> float:
    weights = dict(env.by_number)
    weights[1] -= 1
    return float(weights[1] + env.by_number[1])


def boarded(env: Holds, number: int) -> float:
    board = [row[:] for row in env.board]
    board[0][0] += number
    return board[0][0] / 100


def extended(env: Holds, number: int) -> float:
    row = env.dataset[number]
    row["seen"] = True
    return row["answer"] / 100


def measured(number: int) -> float:
    with the_meter():
        threading.Event().wait(0.005)
    return number / 100


def environment_of(folder: Path, lines: list[str]) -> Any:
    """An environment with this body, whose source can be read."""
    base = "HoldsADatabase" if any("database" in line for line in lines) else "Holds"
    head = f"class Written({base}):\n    def score_episode(env, model, tokenizer, completion, case_idx):\n"
    text = head + "".join(f"        {line}\n" for line in ["n, text = case_idx, completion", *lines])
    file = folder / "written.py"
    file.write_text(text)
    names = {**globals(), **MODULES, "__name__": f"written_{folder.name}"}
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


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.slow
def test_common_patterns_without_state_run_at_the_same_time(name: str, tmp_path: Path, meter: Meter) -> None:
    kind = environment_of(tmp_path, [f"return {STATELESS[name]}"])

    scores, told = scored(kind(), rl_score_range="any")

    assert scores == serially(kind())
    assert told == []
    assert meter.most > 1


def test_standard_output_that_calls_capture_is_their_own(meter: Meter) -> None:
    class Captures(Rows):
        def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                wait()
                print(case_idx)
            return int(text.getvalue()) / 100

    before = sys.stdout
    scores, told = scored(Captures())

    assert scores == serially(Captures())
    assert "sys.stdout" in told[0]
    assert sys.stdout is before


def test_the_working_directory_that_a_call_sets_is_its_own() -> None:
    class Moves(Rows):
        def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
            before = os.getcwd()
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                try:
                    Path("answer").write_text(completion)
                    wait()
                    return int(Path("answer").read_text()) / 100
                finally:
                    os.chdir(before)

    assert scored(Moves())[0] == serially(Moves())


@pytest.mark.slow
def test_a_mutable_default_is_shared_by_all_calls() -> None:
    class Keeps(Rows):
        def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> float:
            return kept(case_idx) / 100

    assert scored(Keeps())[0] == serially(Keeps())
