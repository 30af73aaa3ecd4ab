"""What real runs tell: the model card, in which nothing that somebody named becomes markup, diagnostics, and trackers,
with their real libraries."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aitrain import TrainConfig
from aitrain.runs.diagnosis import LINES_IN_A_ROW, findings_of
from aitrain.runs.run_folder import RunFolder, write_json
from aitrain.ui import card as cards
from aitrain.ui.card import escaped
from tests.environments.vowels import Vowels
from tests.finished_runs import FinishedRuns, Words
from tests.training.conftest import Train, difference


def test_the_card_says_what_was_trained_on_what_and_what_came_of_it(finished: FinishedRuns) -> None:
    result = finished("plain")
    _, head, body = (result.model / "README.md").read_text().split("---\n", 2)
    front = yaml.safe_load(head)
    assert front["library_name"] == "transformers"
    assert {"aitrain", "grpo"} <= set(front["tags"])
    assert "base_model" not in front  # a folder of this machine
    assert re.search(r"\| sampled \| \d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\] \| .* \| [+-]\d\.\d{3} \[[+-]\d", body)
    for fact in ("SHA-256", "finished_runs.py", "3 held out", "4 steps", "| seed | 42 |"):
        assert fact in body.replace("\\", "")


def test_the_card_of_several_environments_names_each_without_folders_and_has_the_recorded_scores(
    tmp_path: Path,
) -> None:
    folder, mean = RunFolder(tmp_path), {"mean": 0.5, "low": 0.25, "high": 0.75, "count": 4}
    folder.write_config(TrainConfig(rl_env=["sums=/elsewhere/sums.py", "hard=/elsewhere/more.py:Hard"]))
    folder.write_status("running")  # as it is when the card is written
    write_json(folder.result, {"scores": {"sampled": {"before": None, "after": mean, "change": None}}})
    facts = {name: {"file": f"/elsewhere/{name}.py"} for name in ("sums", "more")}
    write_json(folder.environment, {"environments": facts})
    folder.model.mkdir()
    assert cards.try_to_write_card(folder) is None
    text = (folder.model / "README.md").read_text().replace("\\", "")
    for said in ("0.500 [0.250, 0.750]", "more.py, SHA", 'rl_env: ["sums=sums.py", "hard=more.py:Hard"]'):
        assert said in text
    assert "/elsewhere" not in text


def test_text_is_escaped() -> None:
    assert escaped("a_b*c <b>&\n| y\x1b") == r"a\_b\*c &lt;b&gt;&amp; \| y\\x1b"


def test_a_card_that_cannot_be_written_costs_no_model(
    train: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(cards, "resolve", refuse)
    result = train(Vowels(), max_steps=1, eval_cases=0)
    assert (result.status, (result.model / "model.safetensors").exists()) == ("finished", True)
    assert "OSError: the disk is full" in capsys.readouterr().err


# -- diagnostics


class Same(Words):
    """All answers are worth the same."""

    def score_episode(self) -> float:  # type: ignore[override]
        return 0.0


def test_a_run_that_cannot_learn_says_so_while_it_runs(
    train: Train, small_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(Same(), max_steps=LINES_IN_A_ROW + 1)

    said = capsys.readouterr().err
    assert said.count("100% of the groups all completions score the same, mostly near 0.00") == 1
    assert "No step changed the weights" in said
    assert difference(result.model, small_model) == 0.0
    assert {"frac_reward_zero_std", "completions/clipped_ratio", "unscored", "entropy"} <= set(result.history[0])
    assert "zero_variance" in [finding.name for finding in findings_of(RunFolder(result.folder))]


# -- trackers


OPTIONS: dict[str, Any] = {
    "eval_cases": 3,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "rl_env_config": {"level": 7, "api_key": "hush"},
}


class SomeFail:
    """Some cases fail."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"# <b>{n}</b>:"} for n in range(20)]

    def score_episode(self, completion: str, case_idx: int) -> float:
        if case_idx % 4 == 0:
            raise ValueError("no\n# luck")
        return min(1.0, completion.count("a") / 2)


def texts(events: EventAccumulator, name: str) -> list[tuple[int, str]]:
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(f"{name}/text_summary")]


def test_trackers_are_told_metrics_scores_and_options(train: Train) -> None:
    result = train(SomeFail(), log="tensorboard", **OPTIONS)
    events = EventAccumulator(str(result.folder / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()

    rewards = {line["step"]: line["reward"] for line in result.history if "reward" in line}
    assert {event.step: event.value for event in events.Scalars("train/reward")} == pytest.approx(rewards)
    scores = [(event.step, event.value) for event in events.Scalars("eval/score")]
    assert [step for step, _ in scores] == [0, 2, 3]
    assert (scores[0][1], scores[-1][1]) == pytest.approx((result.score_before, result.score_after))

    (configuration,) = texts(events, "model_config")
    options = json.loads(configuration[1])["aitrain"]
    assert options["rl_num_generations"] == 4
    assert options["rl_env_config"]["level"] == 7
    assert "hush" not in configuration[1]
    assert "rl_num_generations" not in (result.model / "config.json").read_text()


@pytest.mark.slow
def test_a_tracker_that_fails_is_left_out_and_said_once(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "file"))
    result = train(SomeFail(), log="tensorboard", **OPTIONS)
    assert result.status == "finished"
    assert capsys.readouterr().err.count("tensorboard failed and is disabled") == 1
    assert (tmp_path / "file").read_text() == ""
