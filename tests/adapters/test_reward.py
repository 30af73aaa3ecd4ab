"""Reward functions as TRL's trainers take them, over rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import aitrain
from aitrain import ConfigError
from aitrain.environment.dataset import build_cases, dataset_note
from tests.adapters.conftest import cases_of, made, play, refusal, source_of
from tests.conftest import Run, write

REWARDS = """
from statistics import mean, stdev
def exact(completions, answer, **kwargs):
    return [float(text_of(one).strip() == truth) for one, truth in zip(completions, answer)]

async def short(completions, completion_ids):
    return [1 / (1 + len(ids)) for ids in completion_ids]

def never(completions, **kwargs):
    return [None for _ in completions]

def too_few(completions, **kwargs):
    return [1.0, 1.0]

def longest(prompts, completions, log_metric=None, **kwargs):
    lengths = [len(text_of(one)) for one in completions]
    if log_metric: log_metric("mean_length", sum(lengths) / len(lengths))
    return [float(length == max(lengths) and length > min(lengths)) for length in lengths]

def unique(completions, **kwargs):
    return [float(completions.count(one) == 1) for one in completions]

def standard(completions, **kwargs):
    lengths = [len(text_of(one)) for one in completions]
    return [(length - mean(lengths)) / (stdev(lengths) or 1) for length in lengths]

def majority(completions, **kwargs):
    texts = [text_of(one).strip() for one in completions]
    return [float(text == max(texts, key=texts.count)) for text in texts]

def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]
"""
ROWS = [{"prompt": f"Say {word}: ", "answer": word} for word in ("yes", "no", "maybe")]


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    write(here, {"my_rewards.py": REWARDS, "rows.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS)})


def environment(id: str, **settings: Any) -> Any:
    return made(f"reward:{id}", **{"data": "rows.jsonl", "score_range": "any", **settings})


def test_one_function_scores_an_answer() -> None:
    env = environment("my_rewards.py:exact", score_range="0,1")
    case = cases_of(env)[1]
    assert play(env, case, ["no"])[1].score == 1.0
    assert play(env, case, ["yes"])[1].score == 0.0


def test_several_functions_are_weighted_and_each_is_a_metric() -> None:
    env = environment("my_rewards.py:exact,short", weights=[2, 0.5])
    result = play(env, cases_of(env)[0], ["yes"])[1]
    assert result.score == 2 * 1.0 + 0.5 * 0.25
    assert result.metrics == {"exact": 1.0, "short": 0.25}


def test_a_function_of_another_file_stands_beside_them() -> None:
    write(Path.cwd(), {"other.py": "def ten(completions): return [10] * len(completions)"})
    env = environment("my_rewards.py:exact,other.py:ten")
    assert play(env, cases_of(env)[0], ["yes"])[1].score == 11.0


def test_files_of_one_name_in_two_folders_are_two_files() -> None:
    write(Path.cwd(), {"other/my_rewards.py": "def exact(completions): return [10] * len(completions)"})
    env = environment("my_rewards.py:exact,other/my_rewards.py:exact")
    assert play(env, cases_of(env)[0], ["yes"])[1].score == 11.0
    assert source_of(env)["files"] == ["my_rewards.py", "other/my_rewards.py"]


def test_a_function_that_is_imported_from_elsewhere_brings_its_file_and_a_rule_its_version(here: Path) -> None:
    write(here, {"again.py": "from functools import partial\nfrom my_rewards import exact\nexact = partial(exact)\n"})
    found = source_of(environment(f"{here}/again.py:exact"))
    assert found == {"class": "reward:again.py:exact", "package": None, "files": ["again.py", "my_rewards.py"]}
    assert source_of(environment("gsm8k")) == {
        "class": "reward:gsm8k", "package": f"aitrain {aitrain.__version__}", "files": [],
    }  # fmt: skip


def test_held_out_rows_are_asked_with_solved_cases_as_the_others_are() -> None:
    env = environment("my_rewards.py:exact", eval_data="rows.jsonl", few_shot=1)
    for cases in build_cases(env, None):
        assert cases is not None
        assert [len(case.prompt) for case in cases] == [3, 3]


def test_functions_of_one_name_are_two_metrics() -> None:
    write(Path.cwd(), {"other.py": "def exact(completions): return [10] * len(completions)"})
    env = environment("my_rewards.py:exact,other.py:exact")
    assert play(env, cases_of(env)[0], ["yes"])[1].metrics == {"exact": 1.0, "exact_1": 10.0}


def test_none_is_left_out_and_unscored_if_there_is_nothing_else() -> None:
    env = environment("my_rewards.py:exact,never")
    assert play(env, cases_of(env)[0], ["yes"])[1].score == 1.0
    env = environment("my_rewards.py:never")
    result = play(env, cases_of(env)[0], ["yes"])[1]
    assert (result.score, result.failure) == (None, None)


def test_chat_prompts_give_completions_as_messages() -> None:
    write(Path.cwd(), {"chat.jsonl": json.dumps({"question": "Say yes.", "answer": "yes"})})
    env = environment("my_rewards.py:exact", data="chat.jsonl")
    assert play(env, cases_of(env)[0], ["yes"])[1].score == 1.0


def test_a_function_that_compares_answers_gets_the_whole_group() -> None:
    env = environment("my_rewards.py:exact,longest")
    case = cases_of(env)[0]
    replies = ["yes", "yes, of course"]
    alone = [play(env, case, [reply])[1] for reply in replies]
    assert [result.score for result in alone] == [1.0, 0.0]
    together = env.score_group(
        completions=replies, texts=replies, metrics=[result.metrics for result in alone], case=dict(case.row)
    )
    assert [score.score for score in together] == [1.0, 1.0]
    assert [score.metrics["longest"] for score in together] == [0.0, 1.0]
    assert together[0].metrics["mean_length"] == (3 + 14) / 2


@pytest.mark.parametrize("name", ["unique", "standard", "majority", "longest"])
def test_functions_that_compare_equal_answers_or_need_several_are_found_and_named(name: str) -> None:
    env = environment(f"my_rewards.py:exact,{name}")
    cases_of(env)
    assert env.comparing == [name]
    assert f": {name} " in dataset_note(env)


def test_a_function_whose_trial_fails_is_named_as_well() -> None:
    write(Path.cwd(), {"other.py": "def number(completions): return [int(one) for one in completions]"})
    env = environment("my_rewards.py:longest,other.py:number")
    cases_of(env)
    assert env.comparing == ["longest"]
    assert "number" in dataset_note(env)


@pytest.mark.parametrize(("name", "expected"), [("unique", [0.0, 1.0, 0.0]), ("standard", [0.577, -1.155, 0.577])])
def test_a_group_with_equal_answers_is_compared(name: str, expected: list[float]) -> None:
    env = environment(f"my_rewards.py:{name}")
    case, replies = cases_of(env)[0], ["yes", "no", "yes"]
    alone = [play(env, case, [reply])[1] for reply in replies]
    together = env.score_group(
        completions=replies, texts=replies, metrics=[result.metrics for result in alone], case=dict(case.row)
    )
    assert [result.failure for result in alone] == [None] * 3
    assert [score.score for score in together] == pytest.approx(expected, abs=1e-3)


def test_without_such_a_function_groups_are_not_scored_together() -> None:
    env = environment("my_rewards.py:exact,short")
    cases_of(env)
    assert env.score_group is None


def test_functions_that_compare_can_be_named() -> None:
    env = environment("my_rewards.py:exact,longest", group=["exact"])
    cases_of(env)
    assert env.comparing == ["exact"]


def test_the_tokenizer_is_used_only_for_functions_that_name_completion_ids() -> None:
    env = environment("my_rewards.py:exact")
    case = build_cases(env, None)[0][0]
    assert play(env, case, ["yes"])[1].score == 1.0


def test_a_wrong_number_of_rewards_is_a_failure_with_the_functions_name() -> None:
    env = environment("my_rewards.py:too_few")
    with pytest.raises(Exception, match="too_few returned 2 rewards for 1 completions"):
        play(env, cases_of(env)[0], ["yes"])


def test_the_reference_is_the_answer_of_the_row() -> None:
    env = environment("my_rewards.py:exact")
    for case in cases_of(env):
        assert play(env, case, [env.reference(case.row)])[1].score == 1.0


def test_held_out_rows_come_from_a_file_of_their_own() -> None:
    write(Path.cwd(), {"test.jsonl": json.dumps({"prompt": "Say why: ", "answer": "why"})})
    env = environment("my_rewards.py:exact", eval_data="test.jsonl")
    assert len(cases_of(env)) == 3
    assert [env.reference(row) for row in env.build_eval_dataset()] == ["why"]


@pytest.mark.parametrize(
    ("id", "settings", "words"),
    [
        ("my_rewards.py:exat", {}, ["no function exat in my_rewards.py", "Did you mean exact?"]),
        ("my_rewards.py:exact,shrt", {}, ["no function shrt", "Did you mean short?"]),
        ("my_reward.py:exact", {}, ["no file my_reward.py", "Did you mean my_rewards.py?"]),
        ("exact", {}, ["no reward function exact", "reward:my_rewards.py:exact,short", "gsm8k"]),
        ("my_rewards.py:exact", {"data": "row.jsonl"}, ["no file row.jsonl", "Did you mean rows.jsonl?"]),
        ("my_rewards.py:exact", {"wieghts": [1]}, ["does not take wieghts", "Did you mean weights?"]),
    ],
)
def test_what_is_wrong_is_refused_without_running_the_file(id: str, settings: dict[str, Any], words: list[str]) -> None:
    write(Path.cwd(), {"my_rewards.py": REWARDS + "open('somebody_ran_this', 'w').close()\n"})
    message = refusal(f"reward:{id}", **{"data": "rows.jsonl", **settings})
    assert all(word in message for word in words), message
    assert not Path("somebody_ran_this").exists()


def test_data_is_needed() -> None:
    assert "also needs data" in refusal("reward:my_rewards.py:exact")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"score_range": None}, "set score_range"),
        ({"score_range": "1,0"}, "score_range must be LOW,HIGH"),
        ({"weights": [1, 2]}, "2 weights for 1 reward functions"),
    ],
)
def test_a_range_must_be_declared_and_weights_must_fit(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        environment("my_rewards.py:exact", **settings)


def test_the_range_is_declared_to_the_run() -> None:
    assert environment("my_rewards.py:exact", score_range=[-1, 2]).requirements.score_range == (-1.0, 2.0)
    assert environment("my_rewards.py:exact", score_range="any").requirements.score_range == "any"
    assert environment("my_rewards.py:exact").requirements.isolation == "process"


def test_functions_of_trl_can_be_named() -> None:
    write(Path.cwd(), {"chat.jsonl": json.dumps({"question": "Say yes.", "answer": "yes"})})
    env = environment("trl.rewards:think_format_reward", data="chat.jsonl", score_range="0,1")
    case = cases_of(env)[0]
    assert play(env, case, ["yes"])[1].score == 0.0
    assert play(env, case, ["<think>yes?</think>\nyes"])[1].score == 1.0


# -- rules by name

TRUTHS = ["72", "-3", "1000", "0.5"]


@pytest.fixture
def sums(here: Path) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{truth}?"}],
            "reward_model": {"ground_truth": truth},
        }
        for truth in TRUTHS
    ]
    write(here, {"sums.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize("rule", ["gsm8k", "boxed"])
def test_each_ground_truth_passes_for_its_own_row_and_for_no_other(rule: str) -> None:
    env = made(f"reward:{rule}", data="sums.jsonl")
    cases = cases_of(env)
    for case in cases:
        for other in cases:
            score = play(env, case, [f"So: {env.reference(other.row)}"])[1].score
            assert score == float(case is other or case.number == other.number)


def test_a_ground_truth_may_have_commas() -> None:
    write(Path.cwd(), {"sums.jsonl": '{"prompt": "Much?", "ground_truth": "1,000"}'})
    env = made("reward:gsm8k", data="sums.jsonl")
    (case,) = cases_of(env)
    for reply in (env.reference(case.row), "#### 1000", "#### 1,000"):
        assert play(env, case, [reply])[1].score == 1.0


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize(
    ("rule", "reply", "score"),
    [
        ("gsm8k", "#### 1,000", 1.0),
        ("gsm8k", "#### 5\n#### 1000", 1.0),
        ("gsm8k", "#### 1000\n#### 5", 0.0),
        ("gsm8k", "1000", 0.0),
        ("gsm8k", "", 0.0),
        ("gsm8k", "#### 1000 " + "and " * 100, 0.0),
        ("boxed", r"\boxed{1000}", 1.0),
        ("boxed", r"\boxed{5} or \boxed{ 1000 }", 1.0),
        ("boxed", r"\boxed{1000} or \boxed{5}", 0.0),
        ("boxed", r"\boxed{1000", 0.0),
        ("boxed", r"\boxed{\text{1000}}", 0.0),
        ("boxed", "", 0.0),
    ],
)
def test_a_rule_reads_the_marked_answer_and_nothing_else(rule: str, reply: str, score: float) -> None:
    env = made(f"reward:{rule}", data="sums.jsonl")
    assert play(env, cases_of(env)[2], [reply])[1].score == score


@pytest.mark.slow
def test_a_run_keeps_the_file_of_the_functions(here: Path, aitrain_grpo: Run) -> None:
    config = json.dumps({"data": "rows.jsonl", "score_range": "0,1"})
    done = aitrain_grpo(
        "--model", "tiny", "--rl-env", "reward:my_rewards.py:exact", "--rl-env-config", config,
        "--max-steps", "1", "--rl-max-new-tokens", "4", "--eval-cases", "0", "--project-name", "it",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (here / "runs/it/environment/my_rewards.py").read_text() == REWARDS
    facts = json.loads((here / "runs/it/environment.json").read_text())
    assert facts["file"] == str(here / "my_rewards.py")
    assert facts["sha256"] == hashlib.sha256(REWARDS.encode()).hexdigest()
