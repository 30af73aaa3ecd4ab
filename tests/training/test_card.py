"""The model card of real runs: what it says, and that nothing that somebody named becomes markup."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown import markdown

from aitrain import Result
from aitrain.runs.run_folder import RunFolder
from aitrain.ui import card as cards
from aitrain.ui.card import escaped
from aitrain.ui.reward_plot import draw_curve
from tests.conftest import Run, write
from tests.environments.vowels import Vowels
from tests.finished_runs import FinishedRuns

Train = Callable[..., Result]


@pytest.fixture(autouse=True)
def pictures(only_training: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the reward, as in a run of a user."""
    monkeypatch.setattr(cards, "draw_curve", draw_curve)


class Numbers:
    """With no cases but those for training."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"{n}:"} for n in range(8)]

    def score_episode(self, completion: str) -> float:
        return completion.count("1") / 6


def parts(result: Result) -> tuple[dict[str, Any], str]:
    """The front matter, and what follows."""
    _, front, body = (result.model / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), body


def test_the_card_says_what_was_trained_on_what_and_what_came_of_it(finished: FinishedRuns) -> None:
    front, body = parts(finished("plain"))
    assert front["library_name"] == "transformers"
    assert {"aitrain", "grpo"} <= set(front["tags"])
    assert "base_model" not in front  # a folder of this machine

    assert body.startswith("\n# plain\n")
    assert re.search(r"\| sampled \| \d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\] \| .* \| [+-]\d\.\d{3} \[[+-]\d", body)
    for fact in ("SHA-256", "finished_runs.py", "3 held out", "4 steps", "torch 2.13.0", "| seed | 42 |"):
        assert fact in body.replace("\\", "")


def test_the_held_out_scores_are_results_that_the_hub_reads(finished: FinishedRuns) -> None:
    result = finished("plain")
    data = ModelCard.load(result.model / "README.md").data
    assert data.model_name == "plain"
    found = {each.metric_name: each.metric_value for each in data.eval_results}
    assert found["held-out score, sampled, before training"] == pytest.approx(result.score_before, abs=1e-4)
    assert found["held-out score, sampled, after training"] == pytest.approx(result.score_after, abs=1e-4)
    assert {each.dataset_split for each in data.eval_results} == {"held-out"}
    assert {each.dataset_args["cases"] for each in data.eval_results} == {3}


def test_without_a_picture_the_curve_is_text(finished: FinishedRuns) -> None:
    result = finished("lora")
    front, body = parts(result)
    assert (front["library_name"], front["tags"][-1]) == ("peft", "lora")
    assert "1.0 │" in body
    assert "`merged/` holds base and adapter" in body
    assert not (result.model / "reward.png").exists()


def test_names_that_look_like_markup_are_only_shown(train: Train, small_model: Path, tmp_path: Path) -> None:
    evil = tmp_path / "a|b `c` <img src=x> [d](http:e) **f** # ---"
    shutil.copytree(small_model, evil)
    write(evil, {"README.md": "---\nlicense: apache-2.0\n---\n# base\n"})
    config = {"note": "``` <script>\u202e\x1b[31m| --- |", "api_key": "hush"}
    front, body = parts(train(Vowels(), model=str(evil), rl_env_config=config))

    assert front["license"] == "apache-2.0"
    assert "(reward.png)" in body
    assert "\x1b" not in body
    assert "\u202e" not in body
    assert "hush" not in body
    shown = markdown(body, extensions=["tables", "fenced_code"])
    assert "<script>" not in shown
    assert not re.search(r"<img (?!alt=.Reward)", shown)
    assert 'http:e"' not in shown
    assert {row.count("<td") for row in re.findall("<tr>.*?</tr>", shown, re.DOTALL)} <= {0, 2, 4}


@pytest.mark.slow
def test_a_card_that_cannot_be_written_costs_no_model(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(cards, "draw_curve", refuse)
    result = train(Vowels(), max_steps=1, eval_cases=0)
    assert result.status == "finished"
    assert "The model card could not be written: OSError: the disk is full" in capsys.readouterr().err


MINE = """
from tests.environments.vowels import Vowels


class Mine(Vowels):
    def __init__(self, word):
        super().__init__()
"""


@pytest.mark.slow
def test_the_command_of_the_card_is_the_run(aitrain_grpo: Run, here: Path) -> None:
    write(here, {"my envs/it's.py": MINE})
    given = ["--model", "tiny", "--rl-env", "my envs/it's.py:Mine", "--max-steps", "1", "--rl-max-new-tokens", "4"]
    given += ["--rl-env-config", '{"word": "it\'s $HOME `x`"}', "--no-merge-adapter", "--peft", "--lr", "2e-4"]
    done = aitrain_grpo(*given, "--trl", "scale_rewards=none", "--eval-cases", "2", "-q")
    assert done.returncode == 0, done.stderr

    folder = RunFolder(here / "runs" / "project-name")
    (command,) = re.findall("```bash\n(.*?)\n```", (folder.model / "README.md").read_text(), re.DOTALL)
    words = shlex.split(command)
    assert words[:2] == ["aitrain", "grpo"]
    again = aitrain_grpo(*words[2:], "-q")
    assert again.returncode == 0, again.stderr
    repeated = RunFolder(here / "runs" / "project-name-2").config.read_text()
    assert repeated.replace("project-name-2", "project-name") == folder.config.read_text()


def test_a_run_without_held_out_cases_says_so(train: Train) -> None:
    front, body = parts(train(Numbers(), eval_cases=0, max_steps=1))
    assert "No held-out cases were scored." in body
    assert "model-index" not in front


@pytest.mark.parametrize(
    ("text", "shown"), [("a_b*c", r"a\_b\*c"), ("<b>&", "&lt;b&gt;&amp;"), ("x\n| y", r"x \| y"), ("\x1b", r"\\x1b")]
)
def test_text_is_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown
