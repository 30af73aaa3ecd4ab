"""A run from the environment to the saved model, on real TRL trainings of a few steps."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain import ConfigError, EnvironmentFailed, Result
from aitrain.runs.run_folder import read_lines
from tests.environments.vowels import ChatVowels, Vowels
from tests.training.conftest import difference, weights

Train = Callable[..., Result]


def rollouts(result: Result) -> list[dict[str, Any]]:
    """The records of training, without those of evaluation."""
    records = [record for file in result.folder.glob("rollouts/*.jsonl") for record in read_lines(file)]
    return [record for record in records if "eval_phase" not in record]


def test_every_completion_is_on_record_from_the_first_step_on(train: Train) -> None:
    result = train(ChatVowels(), rl_prompts_per_step=3, rl_num_generations=4, batch_size=2)

    records = rollouts(result)
    assert [record["step"] for record in records] == [1] * 12 + [2] * 12 + [3] * 12
    assert [record["group"] for record in records[:12]] == [0] * 4 + [1] * 4 + [2] * 4
    first = records[0]
    assert first["messages"] == [*first["prompt"], {"role": "assistant", "content": first["completion"]}]
    assert first["score"] == ChatVowels().score_episode(first["completion"])
    assert first["stop"] in ("done", "max_tokens")
    assert 1 <= first["tokens"] <= 6


@pytest.mark.parametrize("options", [{"trl": {"steps_per_generation": 1}}, {"trl": {"steps_per_generation": 8}}, {}])
def test_each_group_of_a_step_has_a_number_of_its_own(train: Train, options: dict[str, Any]) -> None:
    result = train(
        Vowels(), rl_prompts_per_step=4, rl_num_generations=4, batch_size=4, eval_cases=0, max_steps=2, **options
    )

    members: dict[tuple[int, int], list[int]] = {}
    for record in rollouts(result):
        members.setdefault((record["step"], record["group"]), []).append(record["case_idx"])
    assert all(len(cases) == 4 and len(set(cases)) == 1 for cases in members.values())
    assert [group for step, group in members if step == 1] == list(range(len(members) // len({s for s, _ in members})))


def test_the_recorded_advantage_is_the_score_against_its_group(train: Train) -> None:
    result = train(Vowels(), max_steps=1)

    for group in (0, 1):
        members = [record for record in rollouts(result) if record["group"] == group]
        scores = torch.tensor([record["score"] for record in members])
        expected = (scores - scores.mean()) / (scores.std() + 1e-4)
        assert torch.allclose(torch.tensor([record["advantage"] for record in members]), expected, atol=1e-5)


def test_metrics_have_a_line_for_each_step_and_the_mean_score_as_reward(train: Train) -> None:
    result = train(Vowels())

    assert [line["step"] for line in result.history] == [1, 2, 3]
    for line in result.history:
        scores = [record["score"] for record in rollouts(result) if record["step"] == line["step"]]
        assert line["reward"] == pytest.approx(sum(scores) / len(scores))


def test_the_result_says_what_came_out_and_lies_in_the_folder(train: Train, small_model: Path) -> None:
    result = train(Vowels(), project_name="mine")

    written = json.loads((result.folder / "result.json").read_text())
    assert result.folder.name == "mine"
    assert written["status"] == result.status == "finished"
    assert written["steps"] == result.steps == 3
    assert written["score_before"] == result.score_before
    assert written["greedy_after"] == result.greedy_after
    assert written["eval_cases"] == 3
    assert difference(result.model, small_model) > 0


def test_the_history_of_a_result_has_the_metrics_alone_and_reading_it_back_gives_the_same(train: Train) -> None:
    result = train(Vowels(), project_name="mine", max_steps=1)

    assert "schema" not in result.history[0]
    assert {"step", "reward", "loss"} <= result.history[0].keys()
    assert Result.read(result.folder) == result


def test_the_final_model_loads_with_transformers_and_has_a_card(train: Train) -> None:
    result = train(Vowels(), save_strategy="no")

    model = AutoModelForCausalLM.from_pretrained(result.model)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    assert model.generate(**tokenizer("say", return_tensors="pt"), max_new_tokens=2).shape[1] > 3
    assert (result.model / "README.md").exists()
    assert not list(result.model.glob("*.bin"))


def test_an_adapter_loads_with_peft_and_merged_weights_are_base_plus_delta(train: Train, small_model: Path) -> None:
    result = train(Vowels(), peft=True, lora_r=4)

    base = AutoModelForCausalLM.from_pretrained(small_model)
    adapted = PeftModel.from_pretrained(base, result.model)
    deltas = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach()
        for name, module in adapted.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    before, merged = weights(small_model), weights(result.model / "merged")
    assert (result.model / "adapter_model.safetensors").exists()
    assert max(delta.abs().max() for delta in deltas.values()) > 0
    for name, tensor in merged.items():
        delta = deltas.get(name.removesuffix(".weight"), torch.zeros(()))
        assert torch.equal(tensor, before[name] + delta), name


def test_evaluating_leaves_the_training_alone(train: Train) -> None:
    without = train(Vowels(), eval_cases=0, max_steps=4)
    often = train(Vowels(), eval_strategy="steps", eval_steps=1, max_steps=4)

    assert difference(without.model, often.model) == 0.0
    assert without.score_before is None
    assert [line["step"] for line in often.history if "eval_score" in line] == [1, 2, 3]


def test_greedy_decoding_gives_the_same_answer_whatever_the_seed(train: Train) -> None:
    one = train(Vowels(), max_steps=1, seed=1)
    other = train(Vowels(), max_steps=1, seed=2)

    assert one.greedy_before == other.greedy_before
    assert rollouts(one)[0]["completion"] != rollouts(other)[0]["completion"]


def test_the_same_seed_gives_the_same_run(train: Train) -> None:
    one, other = train(Vowels()), train(Vowels())

    assert one.folder != other.folder
    assert difference(one.model, other.model) == 0.0


class Fails(Vowels):
    """Fails in every way, on cases that its row number chooses; right otherwise."""

    def score_episode(self, completion: str, case_idx: int) -> Any:  # type: ignore[override]
        if case_idx >= self.cases:
            return 1.0  # held out
        wrong = {0: "high", 1: float("nan"), 2: 7.0, 3: None}
        if case_idx % 6 == 4:
            raise KeyError("no such case")
        return wrong.get(case_idx % 6, 0.5)


def test_failures_are_missing_data_counted_by_kind_and_told_once(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(Fails(), rl_prompts_per_step=6, batch_size=8, max_steps=4)

    records = rollouts(result)
    kinds = {0: "wrong_type", 1: "not_finite", 2: "out_of_range", 4: "raised"}
    for record in records:
        kind = kinds.get(record["case_idx"] % 6)
        assert (record["error"] or {}).get("kind") == kind
        assert record["score"] == (0.5 if record["case_idx"] % 6 == 5 else None)
        assert record["advantage"] == 0.0
    told = capsys.readouterr().err
    assert told.count("score_episode of case") == 4
    assert "KeyError: 'no such case'" in told
    assert "test_grpo.py, line" in told
    shares = {kind: sum(line[f"failed/{kind}"] for line in result.history) / 4 for kind in kinds.values()}
    for kind, share in shares.items():
        assert share == pytest.approx(sum((r["error"] or {}).get("kind") == kind for r in records) / len(records))


class Broken(Vowels):
    """Works for the held-out cases, never for those to train on."""

    def score_episode(self, case_idx: int) -> float:  # type: ignore[override]
        if case_idx < self.cases:
            raise RuntimeError("the game server is gone")
        return 0.0


def test_a_run_in_which_nothing_can_be_scored_ends_and_is_saved(train: Train, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="3 batches in a row"):
        train(Broken(), max_steps=10)

    (folder,) = (tmp_path / "runs").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["steps"] == 2
    assert (folder / "model" / "model.safetensors").exists()
    assert "the game server is gone" in (folder / "rollouts" / "rank0.jsonl").read_text()


class NeverWorks(Vowels):
    def score_episode(self) -> float:  # type: ignore[override]
        raise RuntimeError("no server")


def test_an_environment_that_fails_on_every_held_out_case_is_refused_before_training(
    train: Train, tmp_path: Path
) -> None:
    with pytest.raises(EnvironmentFailed, match="all 3 held-out cases"):
        train(NeverWorks())

    assert not (tmp_path / "runs").exists()


def test_prompts_that_are_too_long_are_dropped_with_a_count(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    class SomeLong(Vowels):
        def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
            return [{"prompt": "x" * (5 if number % 3 else 50)} for number in range(24)]

    result = train(SomeLong(), rl_max_prompt_length=20)

    assert "8 cases dropped: their prompt has more than 20 tokens" in capsys.readouterr().err
    assert {record["case_idx"] % 3 for record in rollouts(result)} == {1, 2}


def test_a_prompt_limit_that_leaves_too_few_is_an_error(train: Train) -> None:
    with pytest.raises(ConfigError, match="24 had a prompt of more than 3 tokens"):
        train(Vowels(), rl_max_prompt_length=3)


def test_held_out_cases_are_never_trained_on(train: Train) -> None:
    class NoEvalDataset:
        def build_dataset(self) -> list[dict[str, Any]]:
            return [{"prompt": f"say {number}", "case_idx": f"case {number}"} for number in range(30)]

        async def score_episode(self, completion: str) -> dict[str, float]:
            return {"score": min(1.0, len(completion) / 6), "letters": len(completion)}

    result = train(NoEvalDataset(), max_steps=13)

    records = list(read_lines(result.folder / "rollouts" / "rank0.jsonl"))
    held_out = {record["case_idx"] for record in records if record.get("eval_phase") == "after_greedy"}
    trained = {record["case_idx"] for record in records if "eval_phase" not in record}
    assert len(held_out) == 8
    assert held_out.isdisjoint(trained)
    assert len(trained) == 22
    assert "env/letters" in result.history[0]


def test_python_objects_in_the_rows_reach_the_environment_unchanged(train: Train) -> None:
    class Objects(Vowels):
        def build_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
            return [{"prompt": f"say {n}", "allowed": {n, "x"}, "odd": "text" if n else 7} for n in range(8)]

        def build_eval_dataset(self, tokenizer: Any) -> list[dict[str, Any]]:
            return self.build_dataset(tokenizer)[:1]

        def score_episode(self, allowed: set[Any], case: dict[str, Any]) -> float:  # type: ignore[override]
            return float(isinstance(allowed, set) and case["odd"] in ("text", 7))

    assert train(Objects(), max_steps=1).history[0]["reward"] == 1.0


def test_other_fields_of_trl_are_passed_on_and_ours_are_refused(train: Train) -> None:
    assert train(Vowels(), trl={"num_iterations": 2}).steps == 3
    with pytest.raises(ConfigError, match="aitrain has an option for it"):
        train(Vowels(), trl={"learning_rate": 1e-5})
    with pytest.raises(ConfigError, match="TRL refuses these settings"):
        train(Vowels(), trl={"generation_batch_size": 5})


def test_a_run_in_this_process_has_one_process(train: Train) -> None:
    with pytest.raises(ConfigError, match="aitrain grpo --num-processes"):
        train(Vowels(), num_processes=2)


def test_a_second_run_of_the_name_gets_a_folder_of_its_own(train: Train) -> None:
    assert [train(Vowels(), max_steps=1).folder.name for _ in range(2)] == ["project-name", "project-name-2"]


def test_pushing_without_a_token_is_refused_before_anything_is_loaded(
    train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no token to upload with"):
        train(Vowels(), push_to_hub=True)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
def test_every_loss_type_trains_with_the_advantages_of_its_paper(loss: str, train: Train, small_model: Path) -> None:
    result = train(Vowels(), rl_loss_type=loss, max_steps=2, eval_cases=0)

    assert difference(result.model, small_model) > 0
    records = rollouts(result)
    for group in (records[start : start + 4] for start in range(0, len(records), 4)):
        scores = [record["score"] for record in group]
        scale = 1.0 if loss == "dr_grpo" else stdev(scores) + 1e-4
        expected = [(score - mean(scores)) / scale for score in scores]
        assert [record["advantage"] for record in group] == pytest.approx(expected, abs=1e-3)


def test_an_interrupt_in_a_notebook_finishes_the_step_and_saves(train: Train) -> None:
    class Interrupts(Vowels):
        def score_episode(self, completion: str, case_idx: int) -> float:  # type: ignore[override]
            self.scored = getattr(self, "scored", 0) + 1
            if self.scored == 30:
                signal.raise_signal(signal.SIGINT)
            return len(completion) % 5 / 5

    result = train(Interrupts(), max_steps=50)

    assert result.status == "stopped"
    assert 1 <= result.steps <= 4
    assert (result.model / "model.safetensors").exists()
    assert list((result.folder / "checkpoints").iterdir())


def test_the_saved_configuration_is_that_of_the_model(train: Train, small_model: Path) -> None:
    before, after = (json.loads((f / "config.json").read_text()) for f in (small_model, train(Vowels()).model))
    assert before == after


def test_a_small_dataset_is_not_held_out_below_what_a_step_needs(train: Train) -> None:
    class Small:
        def build_dataset(self) -> list[dict[str, Any]]:
            return [{"prompt": f"say {number}"} for number in range(12)]

        def score_episode(self, completion: str) -> float:
            return len(completion) % 5 / 5

    assert train(Small(), rl_prompts_per_step=12, batch_size=48, max_steps=1).score_before is None
    assert train(Small(), rl_prompts_per_step=11, batch_size=44, max_steps=1).score_before is not None


class Talks(ChatVowels):
    """As AITraining's environments do it: the rest of the dialogue happens inside score_episode."""

    def score_episode(self, model: Any, tokenizer: Any, completion: Any, case_idx: int) -> float:  # type: ignore[override]
        self.modes = {*getattr(self, "modes", ()), (model.training, torch.is_grad_enabled())}
        messages = [{"role": "user", "content": "say:"}, *completion, {"role": "user", "content": "and now?"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        second = model.generate(**ids, max_new_tokens=4)[0][ids["input_ids"].shape[1] :]
        return min(1.0, len(tokenizer.decode(second)) / 8)


def test_an_environment_may_generate_further_turns_itself(train: Train, small_model: Path) -> None:
    environment = Talks()
    result = train(environment, peft=True, lora_dropout=0.1)

    assert environment.modes == {(False, False)}
    assert all(record["score"] is not None for record in rollouts(result))
