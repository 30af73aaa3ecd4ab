"""`aitrain env rescore` from its arguments to what it prints, on a run folder with saved episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aitrain.jobs import env_terminal
from aitrain.launch import command_processes
from tests.conftest import json_lines, run_in_process, write
from tests.ui.conftest import record

ENVIRONMENT = """
class Numbers:
    def __init__(self, rows=4):
        self.rows = rows

    def build_dataset(self, tokenizer):
        return [{"prompt": f"{n}? ", "answer": str(n)} for n in range(self.rows)]

    def score_episode(self, text, answer):
        return float(text == answer)
"""


def said(number: int, text: str, score: float | None, **more: Any) -> dict[str, Any]:
    prompt = f"{number}? "
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    more |= {"prompt": prompt, "messages": messages, "row_number": number, "row": {"answer": str(number)}}
    return record(group=number, case_idx=number, score=score, **more)


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with six episodes; its environment is numbers.py, and commands run in this process."""
    records = [
        said(0, "0", 1.0),
        said(1, "1 ", 0.0),
        said(2, "2", 1.0, step=2),
        said(3, "3", None, step=2, stop="env_error", error={"kind": "raised", "place": "score_episode"}),
        said(0, "0", 1.0, step=0, eval_phase="before_sampled"),
        said(1, "9", 0.0, step=0, eval_phase="before_sampled"),
    ]
    config = f"model: tiny\nrl_env: {here / 'numbers_env.py'}\n"
    write(
        here,
        {
            "numbers_env.py": ENVIRONMENT,
            "runs/mine/config.yaml": config,
            "runs/mine/rollouts/1.jsonl": json_lines(records),
        },
    )

    def run_here(module: str, request: Any) -> int:
        assert module == "aitrain.jobs.env_terminal"
        return env_terminal.main(json.loads(json.dumps(request)))

    monkeypatch.setattr(command_processes, "run_on_terminal", run_here)
    monkeypatch.setenv("COLUMNS", "80")
    return here / "runs" / "mine"


@pytest.mark.usefixtures("run")
def test_an_unchanged_scorer_changes_nothing_but_what_had_failed() -> None:
    code, printed, _ = run_in_process("env rescore mine")
    assert code == 0
    assert "held-out, before, sampled: 0.500 before, 0.500 now; 0 of 2 episodes changed, 2 compared" in printed
    assert "training: 0.667 before, 0.667 now; 1 of 4 episodes changed, 3 compared" in printed
    assert "case 3: none -> 1.000" in printed


def test_the_environment_is_found_from_another_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "config.yaml").write_text("model: tiny\nrl_env: numbers_env.py\noutput_dir: runs\n")
    (run / "status.json").write_text(json.dumps({"directory": str(run.parents[1])}))
    (run / "elsewhere").mkdir()
    monkeypatch.chdir(run / "elsewhere")
    code, _, said = run_in_process(f"env rescore {run}")
    assert code == 0, said


@pytest.mark.usefixtures("run")
def test_another_environment_is_given_by_name_with_its_keywords(here: Path) -> None:
    (here / "kinder.py").write_text(ENVIRONMENT.replace("text == answer", "text.strip() == answer"))
    found = json.loads(
        run_in_process("""env rescore mine --rl-env kinder.py --rl-env-config '{"rows": 2}' --json""")[1]
    )
    assert found["phases"]["training"]["mean_after"] == 1.0
    assert found["scored_with_saved_rows"] == 2  # two of the four rows are gone
    assert [one["case"] for one in found["most_changed"]] == [3, 1]


@pytest.mark.usefixtures("run")
def test_one_step_can_be_chosen_and_a_scorer_that_always_fails_is_shown(here: Path) -> None:
    for chosen, cases in (("--step 1", 2), ("", 6)):
        assert json.loads(run_in_process(f"env rescore mine --json {chosen}")[1])["episodes"] == cases
    assert run_in_process("env rescore mine --step 7")[0] == 2
    (here / "broken.py").write_text(ENVIRONMENT.replace("float(text == answer)", "1 / 0"))
    code, _, err = run_in_process("env rescore mine --rl-env broken.py")
    assert code == 3
    assert "broken.py, line 10, in score_episode: return 1 / 0" in err


def test_each_of_several_environments_scores_its_own_episodes_by_the_rows_of_today(run: Path) -> None:
    place = run.parents[1] / "numbers_env.py"
    (run / "config.yaml").write_text(f"model: tiny\nrl_env: ['first={place}', 'second={place}']\n")
    records = [said(1, "1", 1.0, environment="first"), said(1, "1", 0.0, environment="second") | {"row_number": 5}]
    (run / "rollouts" / "1.jsonl").write_text(json_lines(records))
    found = json.loads(run_in_process("env rescore mine --json")[1])
    assert found["scored_with_saved_rows"] == 0
    assert {name: one["mean_after"] for name, one in found["phases"].items()} == {
        "training, first": 1.0, "training, second": 1.0,
    }  # fmt: skip
