"""The scores of held-out cases: of which cases, how often sampled, the same wherever they are shown, and when they end
a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from aitrain import Result, Score
from aitrain.environment.runner import start_runner
from aitrain.errors import ConfigError, EnvironmentFailed, Interrupted
from aitrain.events import Event
from aitrain.jobs import evaluate as eval_job
from aitrain.options.train import OF_THE_RUN, EvalConfig, TrainConfig
from aitrain.runs.model_reference import run_options
from aitrain.runs.records import MetricsLine, RolloutRecord
from aitrain.runs.result import EvalResult
from aitrain.runs.run_folder import RunFolder, append_lines, read_object
from aitrain.training.evaluation import isolated_random_state
from aitrain.training.held_out_scoring import reason_to_stop
from aitrain.training.run_context import RunContext
from aitrain.ui.overview import Overview
from aitrain.ui.terminal import run_texts
from tests.conftest import episodes_of
from tests.environments.vowels import Vowels
from tests.finished_runs import Words
from tests.training.conftest import Train, rollouts
from tests.ui.conftest import read


def test_a_scoring_leaves_the_random_generator_of_a_macs_gpu_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each training step after a scoring would draw the same numbers."""
    restored = list[str]()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: "before")
    monkeypatch.setattr(torch.mps, "set_rng_state", restored.append)
    with isolated_random_state(1):
        pass
    assert restored == ["before"]


def played(result: Result, phase: str) -> list[dict[str, Any]]:
    """The records of one scoring, in the order of their rows and samples."""
    return sorted(rollouts(result, phase), key=lambda record: (record["row_number"], record["sample"]))


class Sampled(Vowels):
    """Solved where the answer has an even length. Held-out rows share their case_idx."""

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"tell {n}:", "case_idx": 7} for n in range(5)]

    def score_episode(self, completion: str, prompt: str) -> Score:  # type: ignore[override]
        return Score(float(len(completion) % 2 == 0), {"length": len(completion)})


def test_a_case_is_sampled_as_often_as_asked_and_every_place_shows_the_same_scores(train: Train) -> None:
    result = train(Sampled(), max_steps=1, eval_samples=3)
    sampled, greedy = played(result, "after_sampled"), played(result, "after_greedy")
    assert [(r["row_number"], r["sample"]) for r in sampled] == [(24 + n, k) for n in range(5) for k in range(3)]
    assert len(greedy) == 5
    cases = [sampled[3 * n : 3 * n + 3] for n in range(5)]
    assert any(len({record["completion"] for record in case}) > 1 for case in cases)
    assert all(len({record["seed"] for record in case}) == 1 for case in cases)  # the environment's: the same case

    assert result.score_after == pytest.approx(fmean(record["score"] for record in sampled))
    recorded = read_object(result.folder / "result.json")["scores"]
    after = recorded["pass@3"]["after"]
    assert after["mean"] == fmean(any(record["score"] == 1.0 for record in case) for case in cases)
    assert after["count"] == 5
    text = f"{after['mean']:.3f} [{after['low']:.3f}, {after['high']:.3f}]"
    assert text in "\n".join(line.plain for line in run_texts(Overview(result.folder)))
    assert text in (result.model / "README.md").read_text()


class Told(Vowels):
    """One held-out case with preset scores: a sampled and a greedy one for each scoring."""

    def __init__(self, *told: tuple[float, float]) -> None:
        super().__init__()
        self.told: Iterator[float] = chain(*told, repeat(0.0))

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": "tell", "case_idx": -1}]

    def score_episode(self, completion: str, case_idx: int) -> float:  # type: ignore[override]
        return next(self.told) if case_idx == -1 else len(completion) % 5 / 5


BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_best": True, "save_strategy": "steps"}


def test_a_run_that_gets_no_better_ends_and_its_best_checkpoint_is_scored_once_more_with_new_samples(
    train: Train,
) -> None:
    """Step 2 is chosen by 0.9, and comes to 0.5."""
    result = train(
        Told((0.1, 0.1), (0.2, 0.2), (0.9, 0.8), (0.3, 0.3), (0.4, 0.4), (0.5, 0.6)), **BEST, max_steps=6, patience=2
    )

    assert result.status == "stopped"
    assert "(--patience 2)" in str(result.stopped_because)
    values = read_object(result.folder / "result.json")
    names = ("model_step", "steps", "score_after", "selection_score", "selection_scorings")
    assert tuple(values[name] for name in names) == (2, 4, 0.5, 0.9, 4)
    assert [values["scores"][name]["after"]["mean"] for name in ("sampled", "greedy")] == [0.5, 0.6]

    (after,), (chosen,) = played(result, "after_sampled"), played(result, "step2_sampled")
    assert (after["weight_version"], after["step"], after["sample"], chosen["sample"]) == (2, 4, 1, 0)
    shown = Overview(result.folder, read(result.folder)).held_out
    found = [(point["step"], point["sampled"]["mean"]) for point in shown]
    assert found == [(0, 0.1), (1, 0.2), (2, 0.5), (3, 0.3), (4, 0.4)]


def test_the_best_step_is_chosen_by_other_cases_than_those_of_the_scores_and_of_an_eval_of_the_run(
    train: Train, evaluate: Evaluate
) -> None:
    class Held(Vowels):
        def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
            return [{"prompt": f"tell {n}:"} for n in range(12)]

    result = train(Held(), **BEST, max_steps=2)
    before = played(result, "before_sampled")
    chosen, reported = (
        {record["row_number"] for record in played(result, f"{phase}_sampled")} for phase in ("step1", "after")
    )
    assert (len(before), len(chosen), len(reported)) == (12, 6, 6)
    assert chosen == {record["row_number"] for record in before} - reported

    values = read_object(result.folder / "result.json")
    assert (values["eval_cases"], values["selection_cases"]) == (6, 6)
    kept = [record["score"] for record in before if record["row_number"] in reported]
    assert values["score_before"] == pytest.approx(fmean(kept))

    taken = run_options(result.folder, OF_THE_RUN)
    evaluated = evaluate("again", Held(), **{**taken, "model": str(result.folder)})
    assert (evaluated.cases, evaluated.overlap) == (6, 0)
    assert evaluated.scores["sampled"] == values["scores"]["sampled"]["after"]


# -- scores that end a run


@pytest.mark.parametrize(
    ("before", "scores", "since"),
    [
        (None, [], 0),
        (0.5, [0.4, 0.3], 2),
        (0.5, [0.5], 1),  # as good is not better
        (None, [0.4, 0.3], 1),
        (0.5, [0.4, 0.6, 0.6, 0.2], 2),
    ],
)
def test_patience_counts_from_the_best_score_that_of_the_initial_policy_included(
    before: float | None, scores: list[float], since: int
) -> None:
    seen = [MetricsLine(10 * n, {"eval_score": score}) for n, score in enumerate(scores, 1)]
    assert reason_to_stop(since + 1, before, seen) is None
    if since:
        assert f"{since} evaluations in a row" in (reason_to_stop(since, before, seen) or "")


# -- evals of a model


Evaluate = Callable[..., EvalResult]


@pytest.fixture
def evaluate(small_model: Path, tmp_path: Path) -> Evaluate:
    """Run an eval in the folder of its name, which may exist."""

    def run(name: str, environment: object, announce: Callable[[Event], None] = lambda _: None, **options: Any) -> Any:
        values = {"model": str(small_model), "output_dir": str(tmp_path), "project_name": name, "rl_max_new_tokens": 5}
        config = EvalConfig(**{**values, "eval_cases": 12, "concurrency": 4, **options})
        folder = RunFolder(tmp_path / name) if (tmp_path / name).exists() else RunFolder.create(config)
        try:
            return eval_job.run(RunContext(config, folder, start_runner(environment, config), announce, lambda _: {}))
        finally:
            folder.write_status("stopped", seconds=0.0)

    return run


def test_a_stop_request_ends_it_after_a_batch_and_status_has_the_progress(
    evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aitrain.training.run_context.StopRequest.on_any_rank", lambda self: True)
    monkeypatch.setattr("aitrain.training.run_context.StopRequest.check", lambda self: None)
    with pytest.raises(Interrupted, match="after 4 of 24 episodes"):
        evaluate("stopped", Words())
    assert len(episodes_of(tmp_path / "stopped", "eval_sampled")) == 4


class AlwaysFails(Words):
    def score_episode(self, completion: str) -> float:
        raise ValueError("no score")


def test_an_environment_that_only_fails_ends_the_eval(evaluate: Evaluate) -> None:
    with pytest.raises(EnvironmentFailed, match="Too few scores in 3 batches"):
        evaluate("all", AlwaysFails())


def test_an_eval_without_a_case_is_refused(evaluate: Evaluate) -> None:
    with pytest.raises(ConfigError, match="no case is held out, 30 have a prompt of more than 1 tokens"):
        evaluate("none", Words(), eval_cases=30, rl_max_prompt_length=1)


class TrainedOnHeldOut(Words):
    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return self.build_dataset(tokenizer)[:2]


@pytest.mark.parametrize(("save_best", "count"), [(False, 2), (True, 3)])
def test_cases_that_were_trained_on_or_chose_the_step_are_counted(
    evaluate: Evaluate, small_model: Path, tmp_path: Path, save_best: bool, count: int
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
    assert evaluate("base", TrainedOnHeldOut(), decoding="greedy").overlap == 0
