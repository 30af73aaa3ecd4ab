"""The adapter of NeMo Gym, against a small resources server of its protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, EnvironmentFailed, TrainConfig
from aitrain.environment.adapters.nemo_gym import NeMoGym
from aitrain.environment.adapters.openenv import OpenEnv
from aitrain.environment.adapters.ors import OpenRewardServer
from aitrain.environment.contract import Case
from aitrain.environment.runner import EnvRunner
from tests.adapters.conftest import cases_of, play_row, rows_of
from tests.adapters.http_servers import NemoHandler, Server
from tests.rehearsal import Rehearsed, call
from tests.runner_calls import open_sessions

PRESS = {
    "type": "function", "name": "press", "description": "Press it.", "strict": True,
    "parameters": {"type": "object", "properties": {"times": {"type": "integer"}}},
}  # fmt: skip
TASK = {
    "responses_create_params": {
        "input": [
            {"role": "developer", "content": "You press."},
            {"role": "user", "content": [{"type": "input_text", "text": "Press it twice."}]},
        ],
        "tools": [PRESS],
    },
    "wanted": 2,
}
TWICE = call("press", times=2)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(NemoHandler).running() as running:
        yield running


def environment(url: str, folder: Path, task: dict[str, Any] = TASK, **settings: Any) -> NeMoGym:
    file = folder / "tasks.jsonl"
    file.write_text(json.dumps(task))
    return NeMoGym(url, **{"data": str(file), "score_range": "0,1", **settings})


def play(server: Server, folder: Path, *replies: str, **more: Any) -> Rehearsed:
    return play_row(environment(server.url, folder, {**TASK, **more}), *replies)


def test_a_row_holds_the_task_and_its_prompt_as_chat_messages(tmp_path: Path, server: Server) -> None:
    for settings, system in (({}, "You press."), ({"system": "Do it."}, "Do it.")):
        (row,) = rows_of(environment(server.url, tmp_path, **settings))
        assert row["prompt"] == [
            {"role": "system", "content": system},
            {"role": "user", "content": "Press it twice."},
        ]
        assert row["task"] == TASK


def test_tools_are_called_in_the_session_and_verify_scores_what_was_said_and_called(
    server: Server, tmp_path: Path
) -> None:
    played = play(server, tmp_path, call("press", hard=True), TWICE, "Done.")
    assert [tool["function"]["name"] for tool in played.opening.tools] == ["press"]
    assert "unknown argument" in played.moves[0].messages[0]["content"]
    assert json.loads(played.moves[1].messages[0]["content"]) == {"presses": 2, "done": False}
    assert played.is_over
    assert played.scored.score == 1.0
    assert played.scored.metrics == {"presses": 2.0, "politeness": 0.5, "mask_sample": 0.0}
    (session,) = server.sessions.values()
    first, _, made, output, answer = session["response"]["output"]
    assert (made["type"], output["type"]) == ("function_call", "function_call_output")
    assert made["call_id"] == output["call_id"] != first["call_id"]
    assert answer["content"][0]["text"] == "Done."
    assert play(server, tmp_path, TWICE, "Done.", masked=True).scored.score is None
    verify = play(server, tmp_path, call("verify"))
    assert verify.moves[0].messages[0]["content"] == "error: there is no tool verify"


# -- all adapters by URL

KINDS = [OpenRewardServer, OpenEnv, partial(NeMoGym, data="tasks.jsonl")]


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_dies_is_a_failure_of_the_server_for_each_episode(kind: Any, here: Path) -> None:
    (here / "tasks.jsonl").write_text('{"responses_create_params": {"input": "?"}}')
    made = kind("http://127.0.0.1:9", score_range="0,1")
    if kind in (OpenRewardServer, OpenEnv):
        with pytest.raises(EnvironmentFailed, match=r"The server at http://127\.0\.0\.1:9 did not answer /"):
            cases_of(made)
    if kind is OpenEnv:
        made.read_schema({"properties": {}})
    row = {"index": 1, "reset": {}, "task": {"responses_create_params": {}}}
    with closing(EnvRunner(made, TrainConfig())) as runner:
        sessions = open_sessions(runner, [Case(number, [], row, number) for number in range(3)], [0, 0, 0])
    assert [one.failure.kind for one in sessions if one.failure] == ["server"] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_url_with_credentials_is_refused_and_not_shown(kind: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        kind("http://me:secret@127.0.0.1:9")
    assert str(caught.value) == "the URL of 127.0.0.1 holds credentials\nServers that want a key are not supported."
