"""OpenEnv and ORS: a training and a play on servers made with their own packages."""

from __future__ import annotations

from pathlib import Path

from aitrain.environment.adapters.ors import OpenRewardServer
from tests.adapters.conftest import play_row
from tests.adapters.real.conftest import Train, in_environment, server

pytestmark = in_environment("older")


def test_openenv_with_64_sessions_at_once_on_two_ranks(tmp_path: Path, train: Train) -> None:
    flags = ["--rl-prompts-per-step=8", "--rl-num-generations=8", "--batch-size=32", "--rl-temperature=2"]
    with server("openenv_game.py", tmp_path, SESSIONS="64") as url:
        settings = {"sessions": 32, "size": 20, "score_range": "0,2"}
        records = train(f"openenv:{url}", "--num-processes=2", *flags, **settings)
    assert len(records) == 5 * 64
    assert all("return" in one["metrics"] for one in records)
    assert records[0]["messages"][0]["content"] == "A number from 0 to 9?"
    assert any("Input should be a valid integer" in str(one["messages"]) for one in records)


def test_tools_of_ors_are_called_and_the_one_that_finishes_ends_the_episode(tmp_path: Path) -> None:
    with server("ors_sums.py", tmp_path) as url:
        calls = ['{"name": "hint"}', '{"name": "submit", "arguments": {"value": "x"}}']
        calls.append('{"name": "submit", "arguments": {"value": 5}}')
        said = [f"<tool_call>{call}</tool_call>" for call in calls]
        played = play_row(OpenRewardServer(url, score_range="0,1"), *said, number=4)
    hint, refused, submitted = (move.messages[0]["content"] for move in played.moves)
    assert (hint, submitted) == ("h" * 9000, "thanks")
    assert refused.startswith("error: ")
    assert played.is_over
    assert played.scored.score == 1.0
