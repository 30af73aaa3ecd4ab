"""OpenEnv and ORS: servers made with their own packages, and trainings on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.real.conftest import Train, grpo, in_environment, server

pytestmark = in_environment("older")


@pytest.fixture
def game(tmp_path: Path) -> Iterator[str]:
    with server("openenv_game.py", tmp_path, "/health", SESSIONS="64") as url:
        yield url


def test_openenv_with_64_sessions_at_once_on_two_ranks(game: str, train: Train) -> None:
    flags = ["--rl-prompts-per-step=8", "--rl-num-generations=8", "--batch-size=32", "--rl-temperature=2"]
    trained = train(f"openenv:{game}", "--num-processes=2", *flags, sessions=32, size=20, score_range="0,2")
    assert len(trained.records) == 5 * 64
    assert trained.missing("return") == []
    assert trained.records[0]["messages"][0]["content"] == "A number from 0 to 9?"
    assert any("Input should be a valid integer" in str(one["messages"]) for one in trained.records)


def test_an_openenv_server_that_allows_one_session_is_reported_before_training(tmp_path: Path, here: Path) -> None:
    with server("openenv_game.py", tmp_path, "/health", SESSIONS="1") as url:
        done = grpo(here, f"openenv:{url}", sessions=8, score_range="0,2")
    assert done.returncode == 3
    assert "allows 1 of 8 sessions at once" in done.stderr
    assert "max_concurrent_envs=8" in done.stderr
    assert not (here / "run" / "metrics.jsonl").exists()


def test_the_mcp_tools_of_an_openenv_environment_are_shown(tmp_path: Path, train: Train) -> None:
    with server("openenv_tools.py", tmp_path, "/health") as url:
        trained = train(f"openenv:{url}", sessions=8, size=12, system="Use a tool.", score_range="0,1")
    (tool,) = trained.records[0]["tools"]
    assert tool["function"]["name"] == "add"
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}


def test_a_server_of_the_open_reward_standard(tmp_path: Path, train: Train) -> None:
    with server("ors_sums.py", tmp_path, "/health") as url:
        trained = train(f"ors:{url}", score_range="0,1")
    assert {tool["function"]["name"] for tool in trained.records[0]["tools"]} == {"submit", "hint"}
    assert trained.records[0]["messages"][0]["content"].startswith("What is ")
