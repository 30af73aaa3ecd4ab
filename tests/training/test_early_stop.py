"""`--until` and `--patience`: after which step a run ends, how it is scored then, and the same after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, Result
from aitrain.runs.run_folder import read_lines
from tests.environments.vowels import Vowels
from tests.training.test_resume import as_if_killed_after, assert_same

Train = Callable[..., Result]
OPTIONS = {
    "max_steps": 6, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
    "save_total_limit": None,
}  # fmt: skip


class Told(Vowels):
    """Twenty held-out cases, which all get the next score of a list each time that they are sampled, `played` of them
    after the first time; each greedy one gets 0."""

    def __init__(self, *scores: float, played: int = 20) -> None:
        super().__init__()
        counts = chain([20], repeat(played))
        each = ([score] * count + [0.0] * count for score, count in zip(scores, counts, strict=False))
        self.scores: Iterator[float] = chain(*each, repeat(0.0))

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"tell {n}", "case_idx": -1} for n in range(20)]

    def score_episode(self, completion: str, case_idx: int) -> float:  # type: ignore[override]
        return next(self.scores) if case_idx == -1 else len(completion) % 5 / 5


def result_of(result: Result) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((result.folder / "result.json").read_text())
    return values


def after(folder: Path) -> list[dict[str, Any]]:
    """The sampled episodes of the last scoring."""
    records = [record for file in folder.glob("rollouts/*.jsonl") for record in read_lines(file)]
    return [record for record in records if record.get("eval_phase") == "after_sampled"]


def sampled_tokens(folder: Path, steps: int) -> int:
    records = [record for file in folder.glob("rollouts/*.jsonl") for record in read_lines(file)]
    return sum(int(str(r["tokens"])) for r in records if "eval_phase" not in r and int(str(r["step"])) <= steps)


def test_a_run_ends_when_the_interval_of_its_held_out_score_begins_at_the_target(train: Train) -> None:
    """Twenty perfect scores have an interval that begins at 0.84. The last 0.5 is of new samples."""
    result = train(Told(0.0, 0.5, 1.0, 0.5), **OPTIONS, until=0.8)

    assert (result.status, result.steps, result.model_step, result.score_after) == ("stopped", 2, 2, 0.5)
    assert result.stopped_because == "the interval of the held-out score 1.000 begins at 0.839 (until=0.8)"
    assert {record["sample"] for record in after(result.folder)} == {1}  # the scorings before are of sample 0
    reached = result_of(result)["time_to_target"]
    assert (reached["target"], reached["steps"], reached["score"]) == (0.8, 2, 1.0)
    assert reached["tokens"] == sampled_tokens(result.folder, 2) > 0
    assert reached["seconds"] > 0
    assert result.time_to_target == reached


def test_a_run_that_gets_no_better_ends_and_has_the_best_step_where_that_is_kept(train: Train) -> None:
    """Step 1 is the best by one half of the cases, and is scored on the other half at the end."""
    result = train(Told(0.1, 0.4, 0.2, 0.4, 0.3, played=10), **OPTIONS, patience=2, save_best=True)

    assert (result.status, result.steps, result.model_step, result.score_after) == ("stopped", 3, 1, 0.3)
    assert result.stopped_because is not None
    assert "2 evaluations in a row have not beaten the held-out score 0.400 (patience=2)" in result.stopped_because
    assert (result.selection_score, result.selection_scorings) == (0.4, 3)
    assert [line["step"] for line in result.history if "eval_score" in line] == [1, 2, 3]


class Length(Told):
    """Scores held-out cases by the answer's length."""

    def score_episode(self, completion: str, case_idx: int) -> float:  # type: ignore[override]
        return 0.9 + len(completion) % 7 / 70 if case_idx == -1 else len(completion) % 5 / 5


@pytest.mark.slow
def test_a_run_that_is_killed_ends_after_the_same_step(train: Train) -> None:
    """Killed before the evaluation that ends it, and in the scoring after the training."""
    options = OPTIONS | {"eval_steps": 2, "until": 0.5}
    whole = train(Length(), project_name="whole", **options)
    assert whole.status == "stopped"
    for step in (whole.steps - 1, whole.steps):
        killed = as_if_killed_after(whole.folder, step, f"killed-{step}")
        resumed = train(Length(), project_name=killed.name, resume_from_checkpoint="auto", **options)
        assert_same(killed, whole.folder)
        assert (resumed.status, resumed.stopped_because) == ("stopped", whole.stopped_because)
        assert resumed.score_after == whole.score_after
        assert whole.time_to_target is not None
        assert resumed.time_to_target is not None
        assert resumed.time_to_target["tokens"] == whole.time_to_target["tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"until": 0.8, "eval_strategy": "no"}, "until: nothing is scored"),
        ({"until": 0.8, "eval_steps": 6}, "until: there is no evaluation before the last of the 6 steps"),
        ({"until": 0.9}, "eval_cases=35 or more"),
        ({"until": 1.0}, "until: 1 must be below 1"),
    ],
)
def test_a_rule_that_could_never_end_the_run_is_refused(options: dict[str, Any], message: str, train: Train) -> None:
    with pytest.raises(ConfigError, match=message):
        train(Told(), **OPTIONS | options)
