"""`--rl-env rows:FILE`: rows of a file with judges, checked, and trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aitrain import EnvironmentFailed, TrainConfig, judges
from aitrain.cli.grpo import plan_lines
from aitrain.environment.judges import asking
from aitrain.launch import preflight
from aitrain.runs.run_folder import read_lines
from aitrain.workbench.worker import check
from tests.adapters.conftest import cases_of, imports_of_its_own, made, play, refusal, source_of
from tests.conftest import Run, write
from tests.judges.conftest import JudgeModel, quoted_in

__all__ = ["imports_of_its_own"]

TRUTHS = ("72", "1000", "-5")
ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"Say {number}."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": number},
    }
    for number, truth in enumerate(TRUTHS)
]


@pytest.fixture(autouse=True)
def files(here: Path) -> None:
    write(here, {"train.jsonl": lines(ROWS), "own.py": "def brief(text): return 1 / (1 + len(text))"})


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_rows_of_xtuner_need_nothing_else() -> None:
    env = made("rows:train.jsonl")
    for case in cases_of(env):
        assert play(env, case, [env.reference(case.row)])[1].score == 1.0
        assert play(env, case, ["#### 3"])[1].score == 0.0
    assert env.score_group is None


def test_several_files_and_held_out_rows_of_their_own(here: Path) -> None:
    write(here, {"more.jsonl": lines(ROWS), "test.jsonl": lines([{**ROWS[0], "reward_model": {"ground_truth": "8"}}])})
    env = made("rows:train.jsonl,more.jsonl", eval_data="test.jsonl")
    assert len(cases_of(env)) == 6
    assert [env.reference(row) for row in env.build_eval_dataset()] == ["#### 8"]


def test_the_run_is_told_the_range_and_to_use_processes_for_code_that_may_hang() -> None:
    assert made("rows:train.jsonl", judges="exact").requirements.as_options() == {"rl_score_range": "0.0,1.0"}
    own = made("rows:train.jsonl", judges=["exact", {"judge": "own.py:brief", "weight": -0.5}])
    assert own.requirements.as_options() == {"rl_score_range": "-0.5,1.0", "rl_env_isolation": "process"}
    assert source_of(own) == {"class": "rows:train.jsonl", "package": None, "files": ["own.py"]}
    assert made("rows:train.jsonl", judges={"judge": "exact", "range": "any"}).requirements.score_range == "any"


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"data_source": "chat"}, {}, "row 0: there is no judge for the data_source chat"),
        ({"data_source": {"sums": 1, "chat": 1}}, {"judges": {"sums": "own.py:brief"}}, "the data_source chat"),
        ({}, {"judges": "exact"}, "row 0: the judge exact needs a column ground_truth"),
    ],
)
def test_rows_that_no_judge_can_score_are_refused_before_training(
    here: Path, row: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    write(here, {"train.jsonl": lines([{"prompt": "Say it.", **row}])})
    with pytest.raises(EnvironmentFailed, match=words):
        cases_of(made("rows:train.jsonl", **settings))


def test_what_is_wrong_is_refused_by_the_command_line() -> None:
    assert "no file trein.jsonl" in refusal("rows:trein.jsonl")
    assert "Did you mean judges?" in refusal("rows:train.jsonl", judge="gsm8k")


def test_the_plan_names_the_judges_of_the_rows() -> None:
    rubric = {"judge": "rubric", "url": "http://a/v1", "model": "m", "rubric": "r", "weight": 0.5, "max_calls": 9}
    config = TrainConfig(rl_env="rows:train.jsonl", rl_env_config={"judges": {"*": "exact", "chat": ["gsm8k", rubric]}})
    shown = next(line for line in plan_lines(preflight.check(config)) if line.startswith("judges"))
    assert shown == "judges       exact; chat: gsm8k + 0.5 x rubric (m at http://a/v1, at most 9 calls)"


class Polite:
    """Judges in an environment of one's own."""

    score_episode = judges.load("exact")

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": "Say yes.", "ground_truth": "yes"}]


def test_in_an_environment_one_line_is_enough() -> None:
    assert play(Polite(), cases_of(Polite())[0], ["yes"])[1].score == 1.0


# -- aitrain env check


def checked(only: list[str], judge: Any) -> list[Any]:
    """What env check sends about train.jsonl with these judges."""
    sent: list[Any] = []
    options = {"rl_env": "rows:train.jsonl", "rl_env_config": {"judges": judge}, "rl_env_isolation": "thread"}
    check({"options": options, "only": only, "seconds": 60.0}, sent.append)
    return sent


def test_checks_leave_out_what_judges_behind_an_address_would_say(
    model: JudgeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(asking.VARIABLE, asking.OFFLINE)
    rubric = {"judge": "rubric", "url": model.url, "model": "m", "rubric": "Is it polite?", "weight": 0.5}
    opened, *_, result, _ = checked(["reference"], ["gsm8k", rubric])
    assert f"Not asked without --ask-judges: the judge at {model.url}." in opened["opened"]["note"]
    assert [finding["level"] for finding in result["result"]["findings"]] == ["info"]  # less than the highest score
    *_, result, _ = checked(["reference"], rubric)
    assert "judges that were not asked" in result["result"]["skipped"]
    assert not model.asked


def test_a_judge_that_obeys_the_answer_is_found_and_one_that_quotes_is_not(model: JudgeModel) -> None:
    rubric = {"judge": "rubric", "url": model.url, "model": "m", "rubric": "Is it right?"}
    model.say = lambda body: json.dumps({"score": 10 if any(truth in quoted_in(body)[0] for truth in TRUTHS) else 0})
    *_, result, _ = checked(["injection"], rubric)
    assert (result["result"]["findings"], result["result"]["skipped"]) == ([], "")
    model.say = lambda body: json.dumps(
        {"score": 10 if "10" in quoted_in(body)[0] or "72" in quoted_in(body)[0] else 0}
    )
    *_, result, _ = checked(["injection"], {**rubric, "cache": "other.sqlite"})
    assert [finding["level"] for finding in result["result"]["findings"]] == ["fail"]


# -- a training


@pytest.mark.slow
def test_a_run_trains_on_rows_with_a_rubric_a_ranking_and_failures(
    here: Path, aitrain_grpo: Run, model: JudgeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(body: dict[str, Any]) -> Any:
        answers = quoted_in(body, "answer")
        if len(answers) > 1:
            return json.dumps({"ranking": sorted(range(1, len(answers) + 1), key=lambda number: answers[number - 1])})
        return 400 if "4" in answers[0] else json.dumps({"score": len(answers[0]) % 11})

    monkeypatch.setenv("JUDGE_SECRET", "a-secret-of-the-judge")
    model.say = say
    common = {"url": model.url, "model": "m", "rubric": "Is it short?", "key_name": "JUDGE_SECRET"}
    described = ["gsm8k", {"judge": "rubric", **common}, {"judge": "ranking", "orders": 1, **common}]
    done = aitrain_grpo(
        "--model", "tiny", "--rl-env", "rows:train.jsonl", "--rl-env-config", json.dumps({"judges": described}),
        "--max-steps", "2", "--rl-max-new-tokens", "4", "--eval-cases", "0", "--rl-max-failed", "1",
        "--project-name", "it", "--rl-num-generations", "4",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = [one for file in (here / "runs/it/rollouts").glob("*.jsonl") for one in read_lines(file)]
    assert {record["score"] for record in records if record["error"]} == {None}
    good = [record for record in records if record["score"] is not None]
    assert all(record["score"] == pytest.approx(sum(record["metrics"].values())) for record in good)
    assert {name for record in good for name in record["metrics"]} == {"gsm8k", "rubric", "ranking"}
    assert set(model.keys) == {"Bearer a-secret-of-the-judge"}
    assert not any(b"a-secret" in file.read_bytes() for file in here.rglob("*") if file.is_file())
