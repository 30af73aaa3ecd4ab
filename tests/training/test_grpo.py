"""A run from the environment to the saved model, on real TRL trainings of a few steps."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain import AitrainError, ConfigError
from aitrain.runs.run_folder import read_object
from tests.environments.vowels import Vowels
from tests.finished_runs import LORA, PLAIN, FinishedRuns
from tests.training.conftest import Train, difference, rollouts, weights


def test_every_completion_is_on_record_with_its_score(finished: FinishedRuns) -> None:
    result = finished("plain")
    records = rollouts(result)

    assert [record["step"] for record in records] == [1 + number // 8 for number in range(32)]
    assert [record["group"] for record in records[:8]] == [0] * 4 + [1] * 4
    for record in records:
        assert record["score"] == Vowels().score_episode(None, None, record["completion"], 0)
        assert record["stop"] in ("done", "max_tokens")
        assert 1 <= record["tokens"] <= 6
    lines = [line for line in result.history if "reward" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["reward"] == pytest.approx(mean(r["score"] for r in records if r["step"] == line["step"]))


def test_the_result_says_what_came_out_and_the_model_loads(finished: FinishedRuns, small_model: Path) -> None:
    result = finished("plain")
    written = read_object(result.folder / "result.json")

    assert (written["status"], written["steps"], written["eval_cases"]) == ("finished", 4, 3)
    assert (written["score_before"], written["scores"]) == (result.score_before, result.scores)
    assert difference(result.model, small_model) > 0
    model = AutoModelForCausalLM.from_pretrained(result.model)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    assert model.generate(**tokenizer("say", return_tensors="pt"), max_new_tokens=2).shape[1] > 3
    assert read_object(small_model / "config.json") == read_object(result.model / "config.json")


def test_an_adapter_loads_with_peft_and_merged_weights_are_base_plus_delta(
    finished: FinishedRuns, small_model: Path
) -> None:
    result = finished("lora")
    base = AutoModelForCausalLM.from_pretrained(small_model)
    adapted = PeftModel.from_pretrained(base, result.model)
    deltas = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in adapted.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    before, merged = weights(small_model), weights(result.model / "merged")
    assert adapted.peft_config["default"].r == LORA["lora_r"]
    assert max(delta.abs().max() for delta in deltas.values()) > 0
    for name, tensor in merged.items():
        delta = deltas.get(name.removesuffix(".weight"), torch.zeros(()))
        assert torch.equal(tensor, before[name] + delta), name


def test_evaluating_leaves_the_training_alone(train: Train, finished: FinishedRuns) -> None:
    """And the same seed gives the same run."""
    often = finished("plain")
    without = train(Vowels(), **PLAIN | {"eval_strategy": "no", "eval_cases": 0})

    assert difference(without.model, often.model) == 0.0
    assert without.score_before is None
    assert [line["step"] for line in often.history if "eval_score" in line] == [1, 2, 3]


def test_what_a_run_in_this_process_cannot_do_is_refused(train: Train) -> None:
    with pytest.raises(ConfigError, match="Use aitrain grpo for several processes"):
        train(Vowels(), num_processes=2)

    class Trains(Vowels):
        build_dataset: Any = lambda self: train(Vowels())

    with pytest.raises(AitrainError, match="another run trains in this process"):
        train(Trains())


class Asks(Vowels):
    """As in AITraining: sets what it scores on itself, and lets the model speak before it reads it."""

    calls = 0

    def score_episode(self, model: Any, tokenizer: Any, completion: str, case_idx: int) -> Any:
        self.modes = {*getattr(self, "modes", ()), (model.training, torch.is_grad_enabled())}
        self.calls += 1
        self.scored = own = case_idx, completion, self.calls
        model.generate(**tokenizer(f"{completion} and now?", return_tensors="pt"), max_new_tokens=4)
        return {"score": float(self.scored == own), "number": own[2]}


def test_an_environment_may_generate_further_turns_itself_with_state_on_self(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = Asks()
    result = train(environment, peft=True, lora_dropout=0.1, max_steps=2, eval_cases=0)

    assert environment.modes == {(False, False)}
    records = rollouts(result)
    assert {record["score"] for record in records} == {1.0}
    assert [record["metrics"]["number"] for record in records] == list(range(1, len(records) + 1))
    assert capsys.readouterr().err.count("calls run one after another") == 1
