"""`--rl-env rows:FILE`: rows of a file with judges, checked, and trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aitrain import EnvironmentFailed
from aitrain.environment.judges import model_judge
from aitrain.runs.environment_source import kept_files
from aitrain.workbench.check.registry import check
from tests.adapters.conftest import cases_of, imports_of_its_own, made, play, refusal
from tests.conftest import json_lines, write
from tests.judges.conftest import JudgeModel

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
    write(here, {"train.jsonl": json_lines(ROWS), "own.py": "def brief(text): return 1 / (1 + len(text))"})


def test_rows_of_xtuner_need_nothing_else() -> None:
    env = made("rows:train.jsonl")
    for case in cases_of(env):
        assert play(env, case, [env.reference(case.row)])[1].score == 1.0
        assert play(env, case, ["#### 3"])[1].score == 0.0
    assert env.score_group is None


def test_the_run_is_told_the_range_and_to_use_processes_for_code_that_may_hang() -> None:
    assert made("rows:train.jsonl", judges="exact").requirements.as_options() == {"rl_score_range": (0.0, 1.0)}
    own = made("rows:train.jsonl", judges=["exact", {"judge": "own.py:brief", "weight": -0.5}])
    assert "Did you mean judges?" in refusal("rows:train.jsonl", judge="gsm8k")
    assert own.requirements.as_options() == {"rl_score_range": (-0.5, 1.0), "rl_env_isolation": "process"}
    wider = made("rows:train.jsonl", judges="exact", score_range="0,2")
    assert wider.requirements.as_options() == {"rl_score_range": "0,2"}
    assert [file["name"] for file in kept_files(own)] == ["own.py"]


def test_rows_that_no_judge_can_score_are_refused_before_training(here: Path) -> None:
    write(here, {"train.jsonl": json_lines([{"prompt": "Say it.", "data_source": "chat", "ground_truth": None}])})
    with pytest.raises(EnvironmentFailed, match="line 1: there is no judge for the data_source chat"):
        cases_of(made("rows:train.jsonl"))
    with pytest.raises(EnvironmentFailed, match="line 1: the judge exact needs a value in the column ground_truth"):
        cases_of(made("rows:train.jsonl", judges="exact"))
    own = made("rows:train.jsonl", judges="own.py:brief")
    assert own.reference(cases_of(own)[0].row) is None


def test_rows_that_are_not_chosen_need_no_judge(here: Path) -> None:
    write(here, {"train.jsonl": json_lines([ROWS[0], {**ROWS[1], "data_source": "chat"}])})
    assert len(cases_of(made("rows:train.jsonl", size=1))) == 1


# -- aitrain env check


def checked(only: list[str], judge: Any) -> list[Any]:
    """What env check sends about train.jsonl with these judges."""
    sent: list[Any] = []
    options = {"rl_env": "rows:train.jsonl", "rl_env_config": {"judges": judge}, "rl_env_isolation": "thread"}
    check({"options": options, "only": only}, sent.append, lambda _: None)
    return sent


def test_checks_leave_out_what_judges_behind_an_address_would_say(
    model: JudgeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(model_judge.VARIABLE, model_judge.OFFLINE)
    rubric = {"judge": "rubric", "url": model.url, "model": "m", "rubric": "Is it polite?", "weight": 0.5}
    opened, *_, result, _ = checked(["reference"], ["gsm8k", rubric])
    assert f"Not asked without --ask-judges: the judge at {model.url}." in opened["opened"]["note"]
    assert [finding["level"] for finding in result["result"]["findings"]] == ["info"]  # less than the highest score
    *_, result, _ = checked(["reference"], rubric)
    assert "judges that were not asked" in result["result"]["skipped"]
    assert not model.asked
