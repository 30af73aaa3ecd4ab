"""The scores of held-out cases: of which cases, how often sampled, and the same wherever they are shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rich.console import Console

from aitrain import Result, Score
from aitrain.environment.runner import start_runner
from aitrain.jobs import evaluate as eval_job
from aitrain.options.evaluate import OF_THE_RUN, EvalConfig
from aitrain.runs.comparison import compare_all
from aitrain.runs.model_reference import read_model, run_options
from aitrain.runs.recorded_scoring import read_scorings
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder, read_lines
from aitrain.training.run_context import RunContext
from aitrain.ui.summary import held_out_curve, scores, summary
from aitrain.ui.terminal import score_table
from tests.environments.vowels import Vowels

Train = Callable[..., Result]


def result_of(result: Result) -> dict[str, Any]:
    """result.json."""
    values: dict[str, Any] = json.loads((result.folder / "result.json").read_text())
    return values


def evaluations(folder: Path, when: str) -> list[dict[str, Any]]:
    """The records of one scoring, in the order of their rows and samples."""
    records = [record for file in folder.glob("rollouts/*.jsonl") for record in read_lines(file)]
    found = [record for record in records if record.get("eval_phase") == when]
    return sorted(found, key=lambda record: (record["row_number"], record["sample"]))


def computed(folder: Path) -> dict[str, Any]:
    """What a page without a result.json computes from the rollouts."""
    result = folder / "result.json"
    kept = result.read_text()
    result.unlink()
    rollouts = RolloutIndex(folder / "rollouts")
    rollouts.refresh()
    found = scores(RunFolder(folder), rollouts)
    result.write_text(kept)
    return found


def shown_in_terminal(values: dict[str, Any]) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(score_table(values))
    return captured.get()


class Repeats(Vowels):
    """Held-out rows that share their case_idx, and score differently: 1, 0, 0, 0.5."""

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"tell {n}", "case_idx": 7, "gives": gives} for n, gives in enumerate((1.0, 0.0, 0.0, 0.5))]

    def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"say {n}", "case_idx": n % 2, "gives": None} for n in range(24)]

    def score_episode(self, completion: str, gives: float | None) -> float:  # type: ignore[override]
        return len(completion) % 5 / 5 if gives is None else gives


@pytest.fixture(scope="module")
def sampled_run(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Three samples of each held-out case, of which two are scored 1, 1, 1 and the others by what was said."""
    import aitrain

    config = aitrain.TrainConfig(
        model=str(small_model), output_dir=str(tmp_path_factory.mktemp("runs")), max_steps=2, rl_max_new_tokens=6,
        rl_kl_coef=0.0, lr=1e-3, save_strategy="no", eval_samples=3, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    return aitrain.train(config, environment=Sampled())


class Sampled(Vowels):
    """Solved where the answer has an even length."""

    def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
        return [{"prompt": f"tell {n}:"} for n in range(5)]

    def score_episode(self, completion: str, prompt: str) -> Score:  # type: ignore[override]
        metrics = {"ends_in_a": 1.0} if completion.endswith("a") else {}
        return Score(float(len(completion) % 2 == 0), metrics | {"length": len(completion)})


@pytest.mark.slow
def test_cases_are_known_by_their_row_where_case_idx_repeats(train: Train) -> None:
    result = train(Repeats(), max_steps=1)

    assert [record["row_number"] for record in evaluations(result.folder, "after_greedy")] == [24, 25, 26, 27]
    values = result_of(result)["scores"]["sampled"]
    assert values["after"]["mean"] == result.score_after == 0.375
    assert values["after"]["count"] == values["change"]["count"] == 4
    assert computed(result.folder) == result_of(result)["scores"]


@pytest.mark.slow
def test_every_place_shows_the_intervals_of_the_result(sampled_run: Result) -> None:
    recorded = result_of(sampled_run)["scores"]
    rollouts = RolloutIndex(sampled_run.folder / "rollouts")
    rollouts.refresh()

    assert computed(sampled_run.folder) == recorded
    assert summary(sampled_run.folder, rollouts)["scores"] == summary(sampled_run.folder, None)["scores"] == recorded
    texts = [shown_in_terminal(recorded), (sampled_run.model / "README.md").read_text()]
    after = recorded["pass@3"]["after"]
    for text in texts:
        assert "pass@3" in text
        assert f"{after['mean']:.3f} [{after['low']:.3f}, {after['high']:.3f}]" in text
    curve = held_out_curve(RunFolder(sampled_run.folder), rollouts)
    assert [point["step"] for point in curve] == [0, 1, 2]
    assert (curve[0]["sampled"], curve[2]["greedy"]) == (recorded["sampled"]["before"], recorded["greedy"]["after"])


def test_a_case_is_sampled_as_often_as_asked_and_once_greedily(sampled_run: Result) -> None:
    sampled, greedy = (evaluations(sampled_run.folder, f"after_{decoding}") for decoding in ("sampled", "greedy"))

    assert [(r["row_number"], r["sample"]) for r in sampled] == [(24 + n, k) for n in range(5) for k in range(3)]
    assert [(r["row_number"], r["sample"]) for r in greedy] == [(24 + n, 0) for n in range(5)]
    assert any(len({r["completion"] for r in sampled[3 * n : 3 * n + 3]}) > 1 for n in range(5))
    assert len({r["seed"] for r in sampled[:3]}) == 1  # the environment's: the same case
    assert sampled_run.score_after == pytest.approx(fmean(r["score"] for r in sampled))
    solved = [any(r["score"] == 1.0 for r in sampled[3 * n : 3 * n + 3]) for n in range(5)]
    assert result_of(sampled_run)["scores"]["pass@3"]["after"]["mean"] == fmean(solved)
    assert result_of(sampled_run)["eval_samples"] == 3


@pytest.mark.slow
def test_a_resumed_run_scores_before_what_it_reports_after(train: Train) -> None:
    """With more cases and samples, what is missing is played with the initial policy; with fewer, the rest is left."""
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    fewer = {"eval_cases": 2, "eval_samples": 1}
    more = {"eval_cases": 5, "eval_samples": 2}
    whole = train(Sampled(), project_name="whole", **options, **more)
    first = train(Sampled(), project_name="run", **options, **fewer)
    grown = train(Sampled(), project_name="run", resume_from_checkpoint="auto", **options, **more)

    assert first.folder == grown.folder
    before = evaluations(grown.folder, "before_sampled")
    assert [(r["row_number"], r["sample"]) for r in before] == [(24 + n, k) for n in range(5) for k in range(2)]
    assert all(r["weight_version"] == 0 for r in before)
    assert grown.greedy_before == whole.greedy_before
    assert grown.score_before == pytest.approx(fmean(r["score"] for r in before))

    shrunk = train(Sampled(), project_name="run", resume_from_checkpoint="auto", **options, eval_cases=2)
    rows = {r["row_number"] for r in evaluations(shrunk.folder, "after_sampled")}
    assert len(rows) == 2
    assert result_of(shrunk)["scores"]["sampled"]["before"]["count"] == 2
    assert computed(shrunk.folder)["greedy"] == result_of(shrunk)["scores"]["greedy"]
    assert shrunk.greedy_before == fmean(
        r["score"] for r in evaluations(shrunk.folder, "before_greedy") if r["row_number"] in rows
    )


def test_the_best_checkpoint_is_scored_once_more_with_new_samples(train: Train) -> None:
    """The scores of the held-out case are told beforehand: step 2 is chosen by 0.9, and comes to 0.5."""
    told = iter([0.1, 0.1, 0.2, 0.2, 0.9, 0.8, 0.3, 0.3, 0.4, 0.4, 0.5, 0.6])

    class Told(Vowels):
        def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
            return [{"prompt": "tell it", "case_idx": -1}]

        def score_episode(self, completion: str, case_idx: int) -> float:  # type: ignore[override]
            return next(told) if case_idx == -1 else len(completion) % 5 / 5

    best = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 1, "save_best": True, "save_strategy": "steps"}
    result = train(Told(), **best)

    values = result_of(result)
    names = ("model_step", "steps", "score_after", "greedy_after", "selection_score", "selection_greedy")
    assert tuple(values[name] for name in names) == (2, 4, 0.5, 0.6, 0.9, 0.8)
    assert values["selection_scorings"] == 4
    assert values["scores"]["sampled"]["after"]["mean"] == 0.5
    assert computed(result.folder) == values["scores"]
    assert "0.500 [" in shown_in_terminal(values["scores"])
    card = (result.model / "README.md").read_text()
    assert re.search(r"\| sampled \| 0\.100 \[.*\] \| 0\.500 \[", card)
    assert "after step 2, chosen by its held-out score, 0.900, the best of 4." in card

    (after,) = evaluations(result.folder, "after_sampled")
    (chosen,) = evaluations(result.folder, "step2_sampled")
    assert (after["weight_version"], after["step"], after["sample"]) == (2, 4, 1)
    assert chosen["sample"] == 0
    rollouts = RolloutIndex(result.folder / "rollouts")
    rollouts.refresh()
    for curve in (held_out_curve(RunFolder(result.folder), rollouts), summary(result.folder, None)["held_out"]):
        found = [(point["step"], point["sampled"]["mean"]) for point in curve]
        assert found == [(0, 0.1), (1, 0.2), (2, 0.5), (3, 0.3), (4, 0.4)]


@pytest.mark.slow
def test_a_damaged_best_checkpoint_leaves_the_last_step_as_the_model_and_says_so(
    train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The second step is the best; its checkpoint is damaged while the last step is scored."""
    told = iter([0.1, 0.1, 0.2, 0.2, 0.9, 0.8, 0.3, 0.3, 0.5, 0.6])

    class Damages(Vowels):
        def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
            return [{"prompt": "tell it", "case_idx": -1}]

        def score_episode(self, completion: str, case_idx: int) -> float:  # type: ignore[override]
            if case_idx != -1:
                return len(completion) % 5 / 5
            score = next(told)
            if score == 0.3:
                (weights,) = tmp_path.glob("runs/*/checkpoints/checkpoint-2/model.safetensors")
                weights.write_bytes(b"damaged")
            return score

    best = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_best": True, "save_strategy": "steps"}
    result = train(Damages(), **best)

    assert (result.status, result.model_step, result.steps, result.selection_score) == ("finished", 3, 3, None)
    assert (result.score_after, result.greedy_after) == (0.5, 0.6)
    note = " ".join(capsys.readouterr().err.split())
    assert "The best step, 2, is lost:" in note
    assert "checkpoint-2 is damaged (model.safetensors has 7 bytes instead of" in note
    assert "model/ has the weights of the last step, 3." in note


@pytest.mark.slow
def test_a_run_resumed_with_other_held_out_cases_chooses_among_scorings_of_those(train: Train) -> None:
    """By one case step 1 was the best, with 0.9; by two there is one scoring, of step 2, that came to 0.3."""
    told = chain([0.1] * 4, [0.9] * 2, [0.2] * 2, [0.5] * 2, repeat(0.3))

    class Told(Vowels):
        def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
            return [{"prompt": f"tell {n}", "case_idx": -1} for n in range(4)]

        def score_episode(self, completion: str, case_idx: int) -> float:  # type: ignore[override]
            return next(told) if case_idx == -1 else len(completion) % 5 / 5

    best = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "save_best": True, "project_name": "run"}
    best |= {"save_strategy": "steps", "save_steps": 1}
    first = result_of(train(Told(), **best, eval_cases=2))
    names = ("model_step", "selection_score", "selection_scorings", "score_after")
    assert tuple(first[name] for name in names) == (1, 0.9, 2, 0.5)

    resumed = result_of(train(Told(), **best, eval_cases=4, resume_from_checkpoint="auto"))
    assert tuple(resumed[name] for name in names) == (2, 0.3, 1, 0.3)
    assert (resumed["eval_cases"], resumed["selection_cases"]) == (2, 2)


def test_the_best_step_is_chosen_by_other_cases_than_those_of_the_scores_and_of_an_eval_of_the_run(
    train: Train,
) -> None:
    class Held(Vowels):
        def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
            return [{"prompt": f"tell {n}:"} for n in range(12)]

    result = train(Held(), max_steps=3, eval_strategy="steps", eval_steps=1, save_best=True, save_strategy="steps")
    played = {
        phase: {record["row_number"] for record in evaluations(result.folder, f"{phase}_sampled")}
        for phase in ("before", "step1", "step2", "step3", "after")
    }
    assert len(played["before"]) == 12
    assert played["step1"] == played["step2"] == played["step3"] == played["before"] - played["after"]
    assert len(played["after"]) == 6

    values, rollouts = result_of(result), RolloutIndex(result.folder / "rollouts")
    rollouts.refresh()
    assert (values["eval_cases"], values["selection_cases"]) == (6, 6)
    before = [
        one["score"] for one in evaluations(result.folder, "before_sampled") if one["row_number"] in played["after"]
    ]
    assert values["score_before"] == pytest.approx(sum(before) / 6)
    assert values["scores"]["sampled"]["before"]["count"] == values["scores"]["sampled"]["change"]["count"] == 6
    assert computed(result.folder) == values["scores"]
    curve = {point["step"]: point["sampled"]["mean"] for point in held_out_curve(RunFolder(result.folder), rollouts)}
    lines = [line for line in result.history if "eval_score" in line]
    assert [curve[line["step"]] for line in lines] == [pytest.approx(line["eval_score"]) for line in lines]
    (comparison,) = compare_all(read_scorings([result.folder]))
    assert comparison.main.change == values["scores"]["sampled"]["change"]

    taken = {name: value for name, value in run_options(read_model(str(result.folder))).items() if name in OF_THE_RUN}
    config = EvalConfig(**{**taken, "model": str(result.folder), "output_dir": str(result.folder.parent)})
    with closing(start_runner(Held(), config)) as runner:
        evaluated = eval_job.run(RunContext(config, RunFolder.create(config), runner, lambda _: None))
    assert (evaluated.cases, evaluated.overlap) == (6, 0)
    assert evaluated.scores["sampled"] == values["scores"]["sampled"]["after"]
