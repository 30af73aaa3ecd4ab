"""A stopped and resumed run against one that was never stopped: the same weights to the last bit, the same records."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.errors import Interrupted, RunFailed
from aitrain.runs.checkpoint import (
    MANIFEST,
    Manifest,
    changed_options,
    checkpoints_of,
    has_steps,
    read_manifest,
    seal,
    step_of,
)
from aitrain.runs.records import RolloutRecord, read_rollouts
from aitrain.runs.reproduction import compare_repetition
from aitrain.runs.run_folder import RunFolder, append_lines, read_object
from aitrain.training.run_context import RunRecorder
from aitrain.training.trainer_checkpoint import resumed_eval_state
from tests.conftest import read_lines
from tests.environments.vowels import Vowels
from tests.finished_runs import EVERY_STEP, LORA, PLAIN, TALK, FinishedRuns, Stops, Talk
from tests.training.conftest import Train, rollouts


def assert_same(one: Path, other: Path) -> None:
    """Weights, metrics and rollouts of two run folders, to the last bit."""
    parts = compare_repetition(RunFolder(one), RunFolder(other)).parts
    assert [same for same, _ in parts.values()] == ["the same bits"] * 3, parts


def as_if_killed_after(run: Path, step: int, name: str, runs: Path | None = None) -> Path:
    """A copy of a run folder, beside it or in `runs`, in which no checkpoint is newer: what a kill some steps later
    leaves."""
    copy = (runs or run.parent) / name
    shutil.copytree(run, copy)
    for checkpoint in checkpoints_of(RunFolder(copy)):
        if step_of(checkpoint) > step:
            shutil.rmtree(checkpoint)
    shutil.rmtree(copy / "model")
    (copy / "result.json").unlink()
    return copy


@pytest.mark.parametrize(
    ("name", "environment", "options", "step"),
    [
        ("plain", Stops, PLAIN, 4),
        pytest.param("plain", Stops, PLAIN, 0, marks=pytest.mark.slow),
        ("lora", Vowels, LORA, 5),
        ("talk", Talk, TALK, 1),
    ],
    ids=[
        "in its last evaluation", "before its first checkpoint",
        "an adapter with dropout, inside a window", "many turns, between two iterations",
    ],
)  # fmt: skip
def test_a_resumed_run_ends_like_one_that_was_never_stopped(
    name: str, environment: Any, options: Any, step: int, train: Train, finished: FinishedRuns, tmp_path: Path
) -> None:
    whole = finished(name)
    killed = as_if_killed_after(whole.folder, step, "killed", tmp_path / "runs")
    resumed = train(environment(), **options, project_name="killed", resume_from_checkpoint="auto")

    assert (resumed.folder, resumed.steps) == (killed, whole.steps)
    assert (resumed.score_after, resumed.scores) == (whole.score_after, whole.scores)
    assert_same(killed, whole.folder)


@pytest.mark.parametrize("step", [2, 4])
def test_a_run_that_was_stopped_and_resumed_ends_like_one_that_was_not(
    step: int, train: Train, finished: FinishedRuns
) -> None:
    """Six scores before training, eight in each step, six after it: the signal comes in a step, also in the last."""
    stopped = train(Stops(6 + 14 * (step - 1) + 1, signal.SIGINT), **PLAIN, project_name="run")
    assert (stopped.status, stopped.steps, stopped.score_after) == ("stopped", step, None)
    resumed = train(Stops(), **PLAIN, project_name="run", resume_from_checkpoint="auto")
    assert_same(resumed.folder, finished("plain").folder)


class Flat(Stops):
    """No score is better than that of the initial policy."""

    def score_episode(self, completion, case_idx):
        super().score_episode(completion, case_idx)
        return 0.0


def test_a_run_that_is_stopped_in_the_step_whose_evaluation_ends_it_makes_no_other_step(train: Train) -> None:
    options = {**PLAIN, "patience": 2, "project_name": "run"}
    stopped = train(Flat(6 + 14 + 1, signal.SIGINT), **options)
    assert (stopped.status, stopped.steps) == ("stopped", 2)
    resumed = train(Flat(), **options, resume_from_checkpoint="auto")
    assert (resumed.status, resumed.steps) == ("stopped", 2)
    assert "--patience 2" in str(resumed.stopped_because)


def test_a_schedule_goes_on_as_for_the_new_number_of_steps(train: Train) -> None:
    options = {"save_strategy": "epoch", "eval_cases": 0, "warmup_ratio": 0.0, "project_name": "run"}
    train(Vowels(), max_steps=2, **options)
    result = train(Vowels(), max_steps=4, resume_from_checkpoint="auto", **options)

    rates = [line["learning_rate"] for line in result.history if "loss" in line]
    assert rates == pytest.approx([1e-3, 5e-4, 5e-4, 2.5e-4])


def test_a_finished_run_is_not_played_again_and_stays_as_it_was_where_it_is_refused_to_continue(
    train: Train, finished: FinishedRuns, tmp_path: Path
) -> None:
    run = RunFolder(finished.copy("plain", tmp_path / "runs" / "run"))
    times = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    again = train(Stops(), **PLAIN, project_name="run", resume_from_checkpoint="auto")
    assert (again.folder, again.steps, again.scores) == (run.path, 4, finished("plain").scores)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == times

    before = run.config.read_bytes(), read_object(run.status)
    with pytest.raises(ConfigError, match="4 steps behind it, more than 3"):
        train(Stops(), **PLAIN | {"max_steps": 3}, project_name="run", resume_from_checkpoint="auto")

    after = read_object(run.status)
    assert after.pop("epoch") > before[1].pop("epoch")  # what the refused command has left behind cannot write
    assert (run.config.read_bytes(), after) == before


def test_a_resumed_run_that_ends_before_its_first_step_has_lost_nothing(
    train: Train, finished: FinishedRuns, tmp_path: Path
) -> None:
    killed = as_if_killed_after(finished("plain").folder, 2, "killed", tmp_path / "runs")
    recorded = [killed / "metrics.jsonl", *killed.glob("rollouts/*.jsonl")]
    before = [file.read_bytes() for file in recorded]
    environment = Stops(1, signal.SIGINT, signal.SIGTERM)
    with pytest.raises(Interrupted):
        train(environment, **PLAIN, project_name="killed", resume_from_checkpoint="auto")

    assert [file.read_bytes() for file in recorded] == before


def test_going_back_to_an_older_checkpoint_forgets_the_newer_ones_with_their_history(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (2, 4):
        made = folder.checkpoints / f"checkpoint-{step}"
        made.mkdir(parents=True)
        seal(made, Manifest(step, {}, {}, "", 1))
    assert has_steps(folder)  # so it is kept, whatever --logging-steps
    rollouts = [RolloutRecord(step=2), RolloutRecord(step=2, eval_phase="step2_greedy"), RolloutRecord(step=3)]
    lines = [{"step": 1}, {"step": 2}, {"step": 3}]  # the evaluation of step 2 did not end
    append_lines(folder.metrics, lines)
    RunRecorder(folder, None).add_rollouts(rollouts)
    with folder.metrics.open("a") as file:
        file.write('{"step": 3, "lo')  # a kill in the middle

    resumed = RunRecorder(folder, folder.checkpoints / "checkpoint-2")
    resumed.add_rollouts([again := RolloutRecord(step=3, completion="again")])

    assert [path.name for path in checkpoints_of(folder)] == ["checkpoint-2"]
    assert list(read_lines(folder.metrics)) == lines[:2]
    assert list(read_rollouts(folder.path)) == [rollouts[0], again]


@pytest.mark.parametrize(
    ("now", "cases", "other", "best"),
    [({}, "same", 0, 1), ({}, "same", 2, 3), ({"eval_samples": 2}, "same", 0, None), ({}, "edited", 0, None)],
)
def test_the_best_step_was_chosen_by_the_same_cases(
    now: dict[str, int], cases: str, other: int, best: int | None, tmp_path: Path
) -> None:
    """`other`: the last step that was scored before an earlier change of the held-out cases."""
    folder, config = RunFolder(tmp_path), TrainConfig(save_best=True)
    made = folder.checkpoints / "checkpoint-3"
    made.mkdir(parents=True)
    (made / "rank_0.pt").touch()
    scored = {"sampled": {"0": [0.5]}, "greedy": {}}
    facts = dict.fromkeys(("class", "file", "sha256", "config", "weights", "chat_template"))
    before = Manifest(3, config.written(), {**facts}, "", 1, held_out="same", before=scored, last_other=other)
    seal(made, before)
    append_lines(folder.metrics, [{"step": step, "eval_score": -step, "eval_samples": 1} for step in range(1, 4)])
    run = SimpleNamespace(config=config.model_copy(update=now), note=print, checkpoint=made, folder=folder)
    state = resumed_eval_state(run, replace(before, held_out=cases))  # type: ignore[arg-type]
    assert (state.best and state.best.step) == best
    assert state.before == (scored if best else {})
    assert state.last_other == (other if best else 3)


def test_a_checkpoint_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "checkpoint-3"
    made.mkdir()
    (made / "trainer_0.pt").touch()
    now = Manifest(3, TrainConfig().written(), {}, "", 1)
    seal(made, now)
    assert changed_options(read_manifest(made), TrainConfig(), 1, 8) == []  # so that what is wrong is said
    with pytest.raises(ConfigError, match=rf"earlier version.*\n.*--model {made}"):
        resumed_eval_state(SimpleNamespace(checkpoint=made), now)  # type: ignore[arg-type]


class Evil:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


@pytest.mark.parametrize("name", ["optimizer.pt", "rank_0.pt"])
def test_no_file_of_a_checkpoint_is_unpickled_even_when_its_manifest_is_forged(
    name: str, train: Train, finished: FinishedRuns, tmp_path: Path
) -> None:
    run = as_if_killed_after(finished("plain").folder, 3, "run", tmp_path / "runs")
    checkpoint = run / "checkpoints" / "checkpoint-3"
    assert "training_args.bin" not in os.listdir(checkpoint)
    (checkpoint / name).write_bytes(pickle.dumps(Evil(tmp_path / "proof"), protocol=2))
    manifest = read_manifest(checkpoint)
    (checkpoint / MANIFEST).unlink()
    seal(checkpoint, manifest)

    with pytest.raises(RunFailed, match=r"checkpoint-3.*contains pickled code"):
        train(Stops(), **PLAIN, project_name="run", resume_from_checkpoint="auto")
    assert not (tmp_path / "proof").exists()


class Split(Vowels):
    """Its held-out cases are taken from its dataset."""

    build_eval_dataset = None  # type: ignore[assignment]


def test_changes_are_refused_and_where_they_are_meant_the_initial_policy_is_scored_with_them(
    train: Train, small_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(small_model, tmp_path / "model")
    options = {**EVERY_STEP, "max_steps": 4, "scheduler": "constant", "model": str(model)}
    run = RunFolder(train(Split(24), project_name="run", **options).folder)
    resume = {"project_name": "run", "resume_from_checkpoint": "auto"}
    shutil.rmtree(run.checkpoints / "checkpoint-4")
    run.result.unlink()

    with pytest.raises(ConfigError, match="dataset: other training cases"):
        train(Split(24), **resume, **options | {"eval_cases": 7})
    with (model / "chat_template.jinja").open("a") as template:
        template.write(" ")
    with pytest.raises(ConfigError, match="text of the template has changed"):
        train(Split(24), **resume, **options)
    with (model / "model.safetensors").open("r+b") as weights:
        weights.seek(-100_000, os.SEEK_END)
        weights.write(b"\0\0\0?" * 25_000)  # 0.5 each
    with pytest.raises(ConfigError, match="model: the content of its files with weights has changed"):
        train(Split(24), **resume, **options)
    changes = {"lr": 1e-2, "rl_max_new_tokens": 2, "resume_anyway": True}
    result = train(Split(24), **resume, **options | changes)
    assert [line["learning_rate"] for line in result.history if "loss" in line] == [1e-3, 1e-3, 1e-3, 1e-2]
    assert {record["tokens"] for record in rollouts(result, "before_sampled")} == {2}
