"""An eval: the episodes of a training with the same options, killed and resumed without a difference."""

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
from aitrain.runs.eval_result import EvalResult
from aitrain.runs.rollout_record import RolloutRecord
from aitrain.runs.run_folder import RunFolder, append_lines, read_lines, read_object, write_json
from aitrain.training import run_recorder
from aitrain.training.run_context import RunContext
from tests.finished_runs import FinishedRuns, Words

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


def test_an_eval_that_was_killed_five_times_ends_with_the_records_of_one_that_was_not(
    evaluate: Callable[..., EvalResult], finished: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while a batch is played, and while its records are written; batches have rows of several lengths."""
    whole = EvalResult.read(finished.make("eval"))
    for kill in range(5):
        with monkeypatch.context() as patch:
            patch.setattr(run_recorder, "append_text", killed_writing(batches=kill, lines=kill))
            with pytest.raises(SystemExit):
                evaluate("killed", Words(), eval_samples=3)
    resumed = evaluate("killed", Words(), eval_samples=3)

    assert records(tmp_path / "killed") == records(finished.make("eval"))
    assert resumed.scores == whole.scores


def killed_writing(batches: int, lines: int) -> Callable[[Path, str], None]:
    """Writes some batches, some lines of the next, and a part of a line; then the process ends."""
    left = [batches]

    def write(path: Path, text: str) -> None:
        texts = text.splitlines(keepends=True)
        with path.open("a") as file:
            file.write("".join(texts if left[0] else texts[:lines]))
            if not left[0]:
                file.write(texts[lines % len(texts)][:40])
                raise SystemExit
        left[0] -= 1

    return write


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


def test_other_weights_or_another_environment_are_not_mixed_with_what_was_scored(
    evaluate: Callable[..., EvalResult], small_model: Path, tmp_path: Path
) -> None:
    model, folder = tmp_path / "model", RunFolder(tmp_path / "changes")
    shutil.copytree(small_model, model)
    evaluate("changes", Words(), model=str(model), decoding="greedy")
    kept = read_object(folder.environment)
    write_json(folder.environment, {**kept, "sha256": "another"})
    with pytest.raises(ConfigError, match="has changed since"):
        evaluate("changes", Words(), model=str(model), decoding="greedy")
    write_json(folder.environment, kept)
    (model / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="has changed since"):
        evaluate("changes", Words(), model=str(model), decoding="greedy")
