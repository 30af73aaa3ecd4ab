"""Trackers, with their real libraries: what they are told of a run, and that none of them can end it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aitrain import ConfigError, Result, TrainConfig

OPTIONS: dict[str, Any] = {
    "eval_cases": 3,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "rl_env_config": {"level": 7, "api_key": "hush"},
}


class Vowels:
    """Some cases fail."""

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": f"# <b>{n}</b>:"} for n in range(20)]

    def score_episode(self, completion: str, case_idx: int) -> float:
        if case_idx % 4 == 0:
            raise ValueError("no\n# luck")
        return min(1.0, completion.count("a") / 2)


def told(result: Result) -> EventAccumulator:
    events = EventAccumulator(str(result.folder / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    return events


def texts(events: EventAccumulator, name: str) -> list[tuple[int, str]]:
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(f"{name}/text_summary")]


def test_trackers_are_told_metrics_scores_options_and_rollouts(
    train: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb, where it is installed, without an account or a network."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    has_wandb = find_spec("wandb") is not None
    result = train(Vowels(), log="wandb,tensorboard" if has_wandb else "tensorboard", **OPTIONS)
    events = told(result)

    rewards = {line["step"]: line["reward"] for line in result.history if "reward" in line}
    assert {event.step: event.value for event in events.Scalars("train/reward")} == pytest.approx(rewards)
    assert events.Scalars("train/time/generate")[-1].value > 0
    scores = [(event.step, event.value) for event in events.Scalars("eval/score")]
    assert [step for step, _ in scores] == [0, 2, 3]
    assert (scores[0][1], scores[-1][1]) == pytest.approx((result.score_before, result.score_after))

    (options,) = texts(events, "options")
    assert "    rl_num_generations: 4\n" in options[1]
    assert "level: 7" in options[1]
    assert "hush" not in options[1]
    assert [step for step, _ in texts(events, "rollouts")] == [0, 1, 2, 2, 3, 3]
    for _, text in texts(events, "rollouts"):  # what was said is no markdown
        assert all(line in ("", "---") or line.startswith("    ") for line in text.split("\n"))
    if has_wandb:
        (run,) = (result.folder / "wandb").glob("offline-run-*")
        assert len(list(run.rglob("rollouts_*.table.json"))) == 6
        recorded = b"".join(file.read_bytes() for file in run.rglob("*.wandb"))
        assert b"rl_num_generations" in recorded
        assert b"hush" not in recorded


@pytest.mark.slow
def test_a_tracker_that_fails_is_left_out_and_said_once(
    train: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "file"))
    result = train(Vowels(), log="tensorboard", **OPTIONS)
    assert result.status == "finished"
    assert capsys.readouterr().err.count("tensorboard failed and is disabled") == 1
    assert (tmp_path / "file").read_text() == ""


def test_a_tracker_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensorbord"):
        TrainConfig(log="tensorbord")
