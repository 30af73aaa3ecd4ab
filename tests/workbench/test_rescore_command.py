"""`aitrain env rescore` from its arguments to what it prints, on a run folder with saved episodes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from aitrain.cli import env_play, env_process, env_rescore, env_show
from aitrain.errors import ConfigError
from aitrain.jobs import env_terminal
from tests.conftest import write

ENVIRONMENT = """
class Numbers:
    def __init__(self, rows=4):
        self.rows = rows

    def build_dataset(self, tokenizer):
        return [{"prompt": f"{n}? ", "answer": str(n)} for n in range(self.rows)]

    def score_episode(self, text, answer):
        return float(text == answer)
"""


def record(number: int, text: str, score: float | None, **more: Any) -> dict[str, Any]:
    prompt = f"{number}? "
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    row = {"row_number": number, "case_idx": number, "row": {"answer": str(number)}, "seed": 1}
    said = {"prompt": prompt, "messages": messages, "completion": text, "turns": [{"tokens": 1, "weight_version": 0}]}
    return {"schema": 1, "step": 1, "group": number, "stop": "done", "score": score, **row, **said, **more}


@pytest.fixture
def run(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with six episodes; its environment is numbers.py, and commands run in this process."""
    records = [
        record(0, "0", 1.0),
        record(1, "1 ", 0.0),
        record(2, "2", 1.0, step=2),
        record(3, "3", None, step=2, stop="env_error", error={"kind": "raised", "place": "score_episode"}),
        record(0, "0", 1.0, step=0, eval_phase="before_sampled"),
        record(1, "9", 0.0, step=0, eval_phase="before_sampled"),
    ]
    lines = "".join(json.dumps(each) + "\n" for each in records)
    config = f"model: tiny\nrl_env: {here / 'numbers_env.py'}\n"
    write(here, {"numbers_env.py": ENVIRONMENT, "runs/mine/config.yaml": config, "runs/mine/rollouts/1.jsonl": lines})

    def run_here(module: str, request: Any) -> int:
        assert module == "aitrain.jobs.env_terminal"
        return env_terminal.main(json.loads(json.dumps(request)))

    monkeypatch.setattr(env_process, "run_on_terminal", run_here)
    monkeypatch.setenv("COLUMNS", "80")
    return here / "runs" / "mine"


@pytest.mark.usefixtures("run")
def test_an_unchanged_scorer_changes_nothing_but_what_had_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert env_rescore.env_rescore("mine") == 0
    printed = capsys.readouterr().out
    assert "held-out, before, sampled         2         2     0.500     0.500         0\n" in printed
    assert "training                          4         3     0.667     0.667         1\n" in printed
    assert "unscored: 1 before, 0 now" in printed
    assert "case 3: none -> 1.000" in printed


@pytest.mark.usefixtures("run")
def test_another_environment_is_given_by_name_with_its_keywords(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "kinder.py").write_text(ENVIRONMENT.replace("text == answer", "text.strip() == answer"))
    assert env_rescore.env_rescore("mine", env="kinder.py", keywords=["rows=2"], as_json=True, last=False) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["phases"]["training"]["mean_after"] == 1.0
    assert found["scored_with_saved_rows"] == 2  # two of the four rows are gone
    assert [one["case"] for one in found["most_changed"]] == [3, 1]


@pytest.mark.usefixtures("run")
def test_one_step_or_the_last_one_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    for chosen, count in (({"step": 1}, 2), ({"last": True}, 2), ({}, 6)):
        env_rescore.env_rescore("mine", as_json=True, **chosen)
        assert json.loads(capsys.readouterr().out)["episodes"] == count
    assert env_rescore.env_rescore("mine", step=7) == 2
    assert "no rollouts of training step 7" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="give one of them"):
        env_rescore.env_rescore("mine", step=1, last=True)


@pytest.mark.usefixtures("run")
def test_a_scorer_that_fails_on_all_episodes_ends_with_3_and_its_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "broken.py").write_text(ENVIRONMENT.replace("float(text == answer)", "1 / 0"))
    assert env_rescore.env_rescore("mine", env="broken.py") == 3
    error = capsys.readouterr().err
    assert "None of 6 episodes could be scored again; 6 failed:" in error
    assert "broken.py, line 10, in score_episode: return 1 / 0" in error


def test_what_is_no_run_or_has_no_environment_is_refused(here: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no run, folder or file mime. Did you mean mine\?"):
        env_rescore.env_rescore("mime")
    with pytest.raises(ConfigError, match="is not a run folder"):
        env_rescore.env_rescore(str(here))
    (run / "config.yaml").write_text("model: tiny\n")
    with pytest.raises(ConfigError, match="name its file with --rl-env"):
        env_rescore.env_rescore("mine")
    (run / "config.yaml").write_text("model: tiny\nrl_env: gone.py\n")
    with pytest.raises(ConfigError, match=r"there is no file gone.py"):
        env_rescore.env_rescore("mine")


def test_the_episodes_of_an_eval_are_scored_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "config.yaml").open("a") as config:
        config.write("decoding: both\n")  # an option of aitrain eval
    (run / "status.json").write_text('{"job": "eval"}')
    env_rescore.env_rescore("mine", as_json=True)
    assert json.loads(capsys.readouterr().out)["episodes"] == 6


@pytest.mark.usefixtures("run")
def test_what_play_and_show_print_is_json_for_a_program(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loud = ENVIRONMENT + "\n    def close(self):\n        print('closed')\n"
    (here / "loud.py").write_text(loud)
    env_show.env_show("loud.py", case="1", as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["class"], shown["shown"][0]["case"], shown["shown"][0]["reference"]) == ("Numbers", 1, "none")

    env_play.env_play("loud.py", policy="empty", as_json=True)
    played = json.loads(capsys.readouterr().out)
    assert (played["score"], played["stop"], played["turns"]) == (0.0, "done", 1)
    assert played["messages"][0]["content"] == ""


@pytest.mark.usefixtures("run")
def test_the_environment_is_closed_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    closed = "\n    def close(self):\n        print('closed')\n"
    (here / "closing.py").write_text(ENVIRONMENT + closed)
    env_rescore.env_rescore("mine", env="closing.py")
    assert capsys.readouterr().out.count("closed") == 1
    for command, arguments in (("play", {"policy": "empty"}), ("show", {})):
        options = {"rl_env": "closing.py", "model": "tiny"}
        assert env_terminal.main({"command": command, "options": options, command: arguments}) == 0
        assert capsys.readouterr().out.count("closed") == 1


def test_a_close_that_raises_is_told_and_changes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raising = "\n    def close(self):\n        raise OSError('gone')\n"
    (here / "raising.py").write_text(ENVIRONMENT + raising)
    options = {"rl_env": "raising.py", "model": "tiny"}
    assert env_terminal.main({"command": "show", "options": options, "show": {}}) == 0
    assert "Numbers.close raised: OSError: gone" in capsys.readouterr().err


def test_an_environment_that_is_not_found_from_this_folder_is_asked_for(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run / "config.yaml"
    config.write_text("model: tiny\nrl_env: numbers_env.py\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ConfigError, match=r"there is no file numbers_env\.py .*\nName it with --rl-env"):
        env_rescore.env_rescore(str(run), most=1)
    with pytest.raises(ConfigError, match=r"no file other\.py") as refused:
        env_rescore.env_rescore(str(run), env="other.py", most=1)
    assert "Name it with" not in str(refused.value)


def test_the_commands_of_the_workbench_give_a_small_model_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    for own, threads in ((None, "1"), ("3", "3")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if own is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", own)
        env_process.limit_threads("tiny")
        assert os.environ["OMP_NUM_THREADS"] == threads
    monkeypatch.delenv("OMP_NUM_THREADS")
    env_process.limit_threads("nobody/not-here")
    assert "OMP_NUM_THREADS" not in os.environ
