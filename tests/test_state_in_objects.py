"""State that calls keep in helper objects, arrays, classes, modules and closures is scored as if calls ran one after
another."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import test_call_policy as here
from tests.test_call_policy import Rows, scored, serially, wait

meter = here.meter
MODULES = {"random": random, "numpy.random": np.random}


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

    @classmethod
    def put(cls, value: Any) -> None:
        cls.current = value


class Viewer:
    def __init__(self, environment: Any) -> None:
        self.environment = environment

    def score(self) -> float:
        return self.environment.case / 100


class Holds(Rows):
    """What the environments below hold."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.tensor = np.zeros((2, 2)), torch.zeros(2)
        self.viewer = Viewer(self)
        self.made: Any = None
        box: dict[str, int] = {}
        self.get = lambda: box["n"]
        self.fill = _filling(box)

    @property
    def lazy(self) -> Game:
        if self.made is None:
            self.made = Game()
        return self.made


def _filling(box: dict[str, int]) -> Any:
    def fill(number: int) -> None:
        box["n"] = number

    return fill


STATEFUL = {
    "fill": ("env.array.fill(n)", "env.array[0, 0]"),
    "data of a tensor, which counts no version": ("env.tensor.data.fill_(n)", "float(env.tensor[0])"),
    "closure": ("env.fill(n)", "env.get()"),
    "made when needed": ("env.lazy.begin(n)", "env.lazy.value()"),
    "another class": ("Registry.put(n)", "Registry.current"),
    "a module": ("here.current = n", "here.current"),
    "os.environ": ('os.environ["AITRAIN_TEST"] = str(n)', 'int(os.environ["AITRAIN_TEST"])'),
    "random.seed": ("random.seed(n)", "random.random()"),
    "a helper that sees the environment": ("env.case = n", "env.viewer.score()"),
}  # fmt: skip
"""What a call writes, and what it reads after a wait."""


def environment_of(folder: Path, lines: list[str]) -> Any:
    """An environment with this body, whose source can be read."""
    head = "class Written(Holds):\n    def score_episode(env, model, tokenizer, completion, case_idx):\n"
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
