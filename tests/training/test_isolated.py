"""An environment in processes of its own: what reaches it there, and what does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from aitrain import EnvironmentFailed, Result, Score
from tests.training.conftest import rollouts

Train = Callable[..., Result]


class Scoring:
    """AITraining's contract; knows its cases from building the dataset."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        self.words = [f"word {number}" for number in range(12)]
        return [{"prompt": word} for word in self.words]

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> Score:
        metrics = {
            "elsewhere": os.getpid() != self.home,
            "cases": len(self.words),
            "tokens": len(tokenizer(completion)["input_ids"]),
            "words": len(tokenizer),
        }
        return Score(1.0, metrics=metrics)


def test_a_scoring_environment_has_its_cases_and_the_tokenizer_there(train: Train) -> None:
    result = train(Scoring(), rl_env_isolation="process", max_steps=2)

    for record in rollouts(result):
        assert record["score"] == 1.0
        assert record["metrics"]["elsewhere"] == 1.0
        assert record["metrics"]["cases"] == 12
        assert record["metrics"]["tokens"] > 0
        assert record["metrics"]["words"] == 259


def test_the_model_is_not_there_and_the_message_says_what_to_do(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    class Asks(Scoring):
        def score_episode(self, model: Any) -> float:  # type: ignore[override]
            return float(model.generate() is None)

    with pytest.raises(EnvironmentFailed, match="failed on all"):
        train(Asks(), rl_env_isolation="process")
    assert 'there is no model.generate: use rl_env_isolation="thread"' in capsys.readouterr().err


def test_what_building_the_dataset_sets_must_be_able_to_travel(train: Train) -> None:
    class Locked(Scoring):
        def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
            import threading

            self.lock = threading.Lock()
            return super().build_dataset(tokenizer)

    with pytest.raises(EnvironmentFailed, match=r"set self\.lock, which cannot be copied to the other processes"):
        train(Locked(), rl_env_isolation="process")
