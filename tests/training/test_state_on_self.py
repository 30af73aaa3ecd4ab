"""Environments as AITraining runs them, with state on `self`, score in a real run what they score one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aitrain import Result
from aitrain.runs.run_folder import read_lines
from tests.environments.vowels import Vowels

Train = Callable[..., Result]


class Asks(Vowels):
    """Sets what it scores on itself, lets the model speak before it reads it, and numbers its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> Any:
        self.calls += 1
        number = self.calls
        self.case, self.said = case_idx, completion
        inputs = tokenizer(f"{case_idx}: ", return_tensors="pt")
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
        is_own = (self.case, self.said, self.calls) == (case_idx, completion, number)
        return {"score": float(is_own), "number": number}


def test_state_on_self_is_right_around_model_generate(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(Asks(), max_steps=2)

    records = list(read_lines(result.folder / "rollouts" / "rank0.jsonl"))
    assert {record["score"] for record in records} == {1.0}
    assert [record["metrics"]["number"] for record in records] == list(range(1, len(records) + 1))
    said = capsys.readouterr().err
    assert said.count("calls run one after another") == 1
