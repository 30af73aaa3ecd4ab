"""reasoning-gym's tasks, on a stand-in with its functions; `real/` has the package itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aitrain import EnvironmentFailed
from tests.adapters.conftest import cases_of, made, play

FACTORY = """
import random
DATASETS = {}

def register_dataset(name, dataset, config, curriculum=None):
    DATASETS[name] = dataset, config

def create_dataset(name, **config):
    dataset, kind = DATASETS[name]
    return dataset(kind(**config))
"""
SUMS = """
import itertools
from dataclasses import dataclass
from reasoning_gym.factory import register_dataset

generated = itertools.count()

@dataclass
class SumsConfig:
    size: int = 500
    seed: int = 0
    max_number: int = 9
    gives_answer: bool = True

class SumsDataset:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):  # another entry each time, as of a task that depends on the hash seed
        left, right = index, next(generated)
        answer = str(left + right) if self.config.gives_answer else None
        return {"question": f"{left} + {right}?", "answer": answer, "metadata": {"sum": left + right}}

    def score_answer(self, answer, entry):
        return float(answer == str(entry["metadata"]["sum"]))

register_dataset("sums", SumsDataset, SumsConfig)
"""
SHOUTS = SUMS.replace("Sums", "Shouts").replace(
    'register_dataset("sums"', 'DATASET_NAME = "shouts"\nregister_dataset(DATASET_NAME'
)
DIGITS = SUMS.replace("Sums", "Digits").replace('"sums"', '"digits"').replace("index, next(generated)", "index % 6, 0")
UTILS = """
import re
SYSTEM_PROMPTS = {"simple": "Answer in <answer> tags."}

def extract_answer(text, tag_name="answer"):
    found = re.findall(f"<{tag_name}>(.*?)</{tag_name}>", text)
    return found[-1] if found else None
"""


@pytest.fixture(autouse=True)
def package(install: Callable[..., None]) -> None:
    tasks = {"sums": SUMS, "shouts": SHOUTS, "digits": DIGITS}
    start = f"from reasoning_gym import {', '.join(tasks)}\nfrom reasoning_gym.factory import create_dataset\n"
    files = {"__init__": start, "factory": FACTORY, **tasks, "utils": UTILS}
    install("reasoning-gym", "0.1.25", {f"reasoning_gym/{name}.py": text for name, text in files.items()})


@pytest.mark.parametrize("few_shot", [0, 2])
def test_a_question_that_the_task_draws_several_times_is_one_case_and_not_a_solved_entry(few_shot: int) -> None:
    env = made("reasoning-gym:digits", size=40, few_shot=few_shot)
    cases = cases_of(env)
    asked = [case.prompt[-1]["content"] for case in cases]
    solved = {message["content"] for message in cases[0].prompt[:-1] if message["role"] == "user"}
    assert asked == [f"{number} + 0?" for number in range(6 - few_shot)]
    assert len(solved) == few_shot
    assert solved.isdisjoint(asked)
    for case in cases:
        assert play(env, case, [env.reference(case.row["entry"])])[1].score == 1.0


def test_what_the_framework_refuses_is_told() -> None:
    with pytest.raises(EnvironmentFailed, match="max_nunber"):
        made("reasoning-gym:shouts", arguments={"max_nunber": 3})
