"""An eval: the episodes of a training with the same options, and what ends it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aitrain.environment.runner import start_runner
from aitrain.errors import ConfigError, EnvironmentFailed, Interrupted
from aitrain.events import Event
from aitrain.jobs import evaluate as job
from aitrain.options.evaluate import EvalConfig
from aitrain.options.train import TrainConfig
from aitrain.runs.records import RolloutRecord
from aitrain.runs.result import EvalResult
from aitrain.runs.run_folder import RunFolder, append_lines, read_lines
from aitrain.training.run_context import RunContext
from tests.finished_runs import Words

Records = list[dict[str, Any]]


class FailsOn(Words):
    """Fails on some cases."""

    def __init__(self, *failing: int) -> None:
        self.failing = failing

    def score_episode(self, completion: str, case_idx: int) -> float:  # type: ignore[override]
        if case_idx in self.failing:
            raise ValueError("no score")
        return 1.0


@pytest.fixture
def evaluate(small_model: Path, tmp_path: Path) -> Callable[..., EvalResult]:
    """Run an eval in the folder of its name, which may exist."""

    def run(name: str, environment: object, announce: Callable[[Event], None] = lambda _: None, **options: Any) -> Any:
        values = {"model": str(small_model), "output_dir": str(tmp_path), "project_name": name, "rl_max_new_tokens": 5}
        config = EvalConfig(**{**values, "eval_cases": 12, "concurrency": 4, **options})
        folder = RunFolder(tmp_path / name) if (tmp_path / name).exists() else RunFolder.create(config)
        try:
            return job.run(RunContext(config, folder, start_runner(environment, config), announce))
        finally:
            folder.write_status("stopped", seconds=0.0)

    return run


def records(folder: Path) -> Records:
    """All records in the order of the file, without the one value that differs each time."""
    found = [record for file in sorted(folder.glob("rollouts/*.jsonl")) for record in read_lines(file)]
    return [{name: value for name, value in record.items() if name != "seconds"} for record in found]


def test_a_stop_request_ends_it_after_a_batch_and_status_has_the_progress(
    evaluate: Callable[..., EvalResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aitrain.training.run_context.StopRequest.on_any_rank", lambda self: True)
    monkeypatch.setattr("aitrain.training.run_context.StopRequest.check", lambda self: None)
    with pytest.raises(Interrupted, match="after 4 of 24 episodes"):
        evaluate("stopped", Words())
    assert len(records(tmp_path / "stopped")) == 4


def test_failures_are_apart_and_an_environment_that_only_fails_ends_the_eval(
    evaluate: Callable[..., EvalResult], tmp_path: Path
) -> None:
    some = evaluate("some", FailsOn(*range(0, 30, 3)))
    assert some.scores["sampled"]["mean"] == 1.0  # type: ignore[index]
    assert some.failures["raised"] == sum(record["error"] is not None for record in records(tmp_path / "some")) > 0

    with pytest.raises(EnvironmentFailed, match="failed on every episode"):
        evaluate("all", FailsOn(*range(30)))


def test_an_eval_without_a_case_is_refused(evaluate: Callable[..., EvalResult]) -> None:
    with pytest.raises(ConfigError, match="all 30 cases have a prompt of more than 1 tokens"):
        evaluate("none", Words(), eval_cases=30, rl_max_prompt_length=1)


@pytest.mark.parametrize(("save_best", "count"), [(False, 2), (True, 3)])
def test_cases_that_were_trained_on_or_chose_the_step_are_counted(
    evaluate: Callable[..., EvalResult], small_model: Path, tmp_path: Path, save_best: bool, count: int
) -> None:
    config = TrainConfig(output_dir=str(tmp_path), project_name="run", save_best=save_best, rl_env="named.otherwise")
    trained = RunFolder.create(config)
    trained.write_config(config)
    shutil.copytree(small_model, trained.model)
    trained.rollouts.mkdir()
    kinds: list[dict[str, Any]] = [{}, {}, {"discarded": 0}, {"eval_phase": "step1_sampled"}, {"eval_phase": "after"}]
    prompts = [row["prompt"] for row in Words().build_dataset(None)]
    played = [RolloutRecord(prompt=prompt, **kind) for prompt, kind in zip(prompts, kinds, strict=False)]
    append_lines(trained.rollouts / "rank0.jsonl", [record.to_json() for record in played])
    found = evaluate("more", Words(), model=str(trained.path), decoding="greedy", eval_cases=1000)
    assert found.overlap == count
