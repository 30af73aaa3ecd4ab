"""The adapter of the Open Reward Standard, against a small server of the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aitrain import EnvironmentFailed, TrainConfig
from aitrain.environment.adapters.nemo_gym import NeMoGym
from aitrain.environment.adapters.openenv import OpenEnv
from aitrain.environment.adapters.openenv_text import OpenEnvText
from aitrain.environment.adapters.ors import OpenRewardServer
from aitrain.environment.contract import Case
from aitrain.environment.runner import EnvRunner
from aitrain.execution.failure import CallFailed
from tests.adapters.conftest import play_row, rows_of
from tests.adapters.http_servers import OrsHandler, Server
from tests.rehearsal import Rehearsed
from tests.runner_calls import open_sessions


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(OrsHandler).running() as running:
        yield running


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def play(server: Server, *replies: str, **settings: Any) -> Rehearsed:
    return play_row(OpenRewardServer(server.url, **{"score_range": "0,1", **settings}), *replies, number=3)


def test_a_tool_that_finishes_ends_the_episode_with_its_reward(server: Server) -> None:
    played = play(server, call("hint"), call("submit", '{"value": 4}'), "never said")
    assert played.is_over
    assert played.opening.messages == ({"role": "user", "content": "What is 3 + 1?"},)
    assert [tool["function"]["name"] for tool in played.opening.tools] == ["submit", "hint"]
    said = [message for move in played.moves for message in move.messages]
    assert said == [
        {"role": "tool", "name": "hint", "content": "it is        a number"},  # spaces at the edge of a chunk are kept
        {"role": "tool", "name": "submit", "content": "right"},
    ]
    assert played.scored.score == 1.0
    assert played.scored.metrics == {"off_by": 0.0, "return": 1.0, "rewards": 1.0}
    assert server.sessions == {}
    assert server.asked[-2:] == ["/delete", "/delete_session"]


def test_an_answer_without_a_call_goes_to_the_terminal_tool(server: Server) -> None:
    played = play(server, "4")
    assert played.is_over
    assert played.scored.score == 1.0
    assert play(server, call("hint"), unrewarded=None).scored.score is None


def test_a_wrong_call_gets_an_error_and_the_episode_goes_on_and_a_tool_that_raises_fails_it(server: Server) -> None:
    with pytest.raises(CallFailed, match="ZeroDivisionError: division by zero"):
        play(server, call("submit", '{"value": 103}'))
    played = play(server, call("submit", '{"value": "four"}'), call("submit", "4"), call("submit", '{"value": 5}'))
    first, second, third = (move.messages[0]["content"] for move in played.moves)
    assert first == "error: Tool input validation error: value"
    assert second.startswith("error: submit: the arguments are not a JSON object")
    assert third == "wrong"
    assert [move.wrong_calls for move in played.moves] == [0, 1, 0]
    assert played.scored.score == 0.0


KINDS = [OpenRewardServer, OpenEnv, partial(NeMoGym, data="tasks.jsonl")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_dies_is_a_failure_of_the_server_for_each_episode(kind: Any, here: Path) -> None:
    (here / "tasks.jsonl").write_text('{"responses_create_params": {"input": "?"}}')
    made = kind("http://127.0.0.1:9", score_range="0,1")
    with pytest.raises(EnvironmentFailed, match=r"Start the .* server at http://127\.0\.0\.1:9 first"):
        rows_of(made)
    if kind is OpenEnv:
        made.text = OpenEnvText({"properties": {}})
    row = {"index": 1, "reset": {}, "task": {}}
    with closing(EnvRunner(made, TrainConfig(rl_env_retries=1))) as runner:
        sessions = open_sessions(runner, [Case(number, [], row, number) for number in range(3)], [0, 0, 0])
    assert [one.failure.kind for one in sessions if one.failure] == ["server"] * 3
