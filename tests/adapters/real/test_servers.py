"""OpenEnv and ORS: a training and a play on servers made with their own packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from aitrain.environment.adapters.ors import OpenRewardServer
from tests.adapters.conftest import play_row
from tests.adapters.real.conftest import Train, in_environment, server
from tests.rehearsal import call

pytestmark = in_environment("older")


def test_openenv_with_64_sessions_at_once_on_two_ranks(tmp_path: Path, train: Train) -> None:
    flags = ["--rl-prompts-per-step=8", "--rl-num-generations=8", "--batch-size=32", "--rl-temperature=2"]
    with server("openenv_game.py", tmp_path, SESSIONS="64") as url:
        settings = {"sessions": 32, "size": 20, "score_range": "0,2"}
        records = train(f"openenv:{url}", "--num-processes=2", *flags, **settings)
    assert len(records) == 5 * 64
    assert records[0]["messages"][0]["content"] == "A number from 0 to 9?"
    assert any("Input should be a valid integer" in str(one["messages"]) for one in records)


def test_tools_of_ors_are_called_and_the_one_that_finishes_ends_the_episode(tmp_path: Path) -> None:
    wrong = call("submit", value="x"), '<tool_call>{"name": "submit", "arguments": 4}</tool_call>'
    with server("ors_sums.py", tmp_path) as url:
        environment = OpenRewardServer(url, score_range="0,1")
        played = play_row(environment, call("hint"), *wrong, call("submit", value=5), "never said", number=4)
        assert play_row(environment, call("hint")).scored.score == 0.0
        with pytest.raises(RuntimeError, match="division by zero"):
            play_row(environment, call("submit", value=100))
    assert played.opening.messages == ({"role": "user", "content": "What is 4 + 1?"},)
    assert {tool["function"]["name"] for tool in played.opening.tools} == {"submit", "hint"}
    hint, refused, malformed, submitted = (move.messages[0]["content"] for move in played.moves)
    assert (hint, submitted) == ("two" + " " * 9000 + "words", "thanks")  # spaces at the edges of chunks are kept
    assert refused.startswith("error: ")
    assert malformed.startswith("error: submit: the arguments are not a JSON object")
    assert played.is_over
    assert played.scored.score == 1.0
    assert played.scored.metrics == {"off_by": 0.0}
