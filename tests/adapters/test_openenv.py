"""The adapter of OpenEnv, against a small server of its websocket protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from aitrain import TrainConfig
from aitrain.environment.adapters.openenv import ActionRefusedError, OpenEnv
from aitrain.environment.contract import Case
from aitrain.environment.runner import start_runner
from aitrain.environment.session import AssistantTurn
from tests.adapters.conftest import play_row, rows_of
from tests.rehearsal import Rehearsed, call
from tests.runner_calls import end, open_sessions, respond

pytest.importorskip("websockets")

from tests.adapters.openenv_server import CALL_TOOL, GUESS, OpenEnvServer


@pytest.fixture
def server() -> Iterator[OpenEnvServer]:
    with OpenEnvServer().running() as running:
        yield running


def environment(server: OpenEnvServer, **settings: Any) -> OpenEnv:
    return OpenEnv(server.url, **{"score_range": "-1,1", "sessions": 2, **settings})


def play(server: OpenEnvServer, *replies: str, number: int = 0, **settings: Any) -> Rehearsed:
    return play_row(environment(server, **settings), *replies, number=number)


def test_each_case_is_reset_with_its_own_seed(server: OpenEnvServer) -> None:
    settings = {"size": 3, "seed": 20, "reset": {"tone": " Hurry!"}, "system": "Guess."}
    openings = [play(server, number=number, **settings).opening for number in range(3)]
    assert [[message["content"] for message in opening.prompt or []] for opening in openings] == [
        ["Guess.", "A number from 0 to 9. Hurry!"]
    ] * 3
    assert server.resets == [{"tone": " Hurry!", "seed": 20 + number} for number in range(3)]


def test_the_answer_is_the_action_and_done_ends_the_episode_with_the_sum_of_rewards(server: OpenEnvServer) -> None:
    played = play(server, " 2 ", "seven?", "7", number=7)
    said = [move.messages[0]["content"] for move in played.moves]
    assert said == ["higher", "error: guess: Input should be a valid integer", "right"]
    assert played.is_over
    assert played.scored.score == pytest.approx(0.9)
    assert played.scored.metrics == {"luck": 0.5}
    assert play(server, "2", "7", number=7, rewards="last").scored.score == 1.0
    assert play(server).scored.score == 0.0


def test_the_tools_of_an_mcp_environment_are_offered_as_tools() -> None:
    with OpenEnvServer(action=CALL_TOOL).running() as server:
        played = play(server, call("guess", number=2), call("guess", number=7), number=7)
        assert play(server, "I do not know.").is_over
    assert [tool["function"]["name"] for tool in played.opening.tools] == ["guess"]
    assert [move.messages[0]["content"] for move in played.moves] == ["higher", "right"]
    assert played.is_over
    assert played.scored.score == pytest.approx(0.9)


def test_a_server_that_allows_too_few_sessions_fails_the_others_with_what_to_do() -> None:
    with OpenEnvServer(most=2).running() as server:
        made = environment(server, sessions=3)
        cases = [Case(number, row["prompt"], row, number) for number, row in enumerate(rows_of(made)[:3])]
        with closing(start_runner(made, TrainConfig(rl_env_isolation="process"))) as runner:
            sessions = open_sessions(runner, cases, [0] * 3)
            end(runner, sessions)
    (failure,) = [one.failure for one in sessions if one.failure]
    assert (failure.kind, "max_concurrent_envs" in failure.message) == ("server", True)


def test_episodes_at_once_have_a_session_each_and_fail_as_server_when_it_is_lost(server: OpenEnvServer) -> None:
    made = environment(server, sessions=20)
    cases = [Case(number, row["prompt"], row, number) for number, row in enumerate(rows_of(made)[20:40])]
    with closing(start_runner(made, TrainConfig(rl_env_isolation="process", rl_score_range="-1,1"))) as runner:
        sessions = open_sessions(runner, cases, [0] * 20)
        answers = respond(runner, sessions[:10], [AssistantTurn(str(number)) for number in range(10)])
        assert server.highest == 20
        server.lose_connections()
        respond(runner, sessions[10:11], [AssistantTurn("0")])
        end(runner, sessions)
    assert [answer.messages[0]["content"] for answer in answers] == ["right"] * 10
    failure = sessions[10].failure
    assert (failure.kind, "closed it" in failure.message) == ("server", True)


# -- answers as actions, observations as text

MOVE = {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}, "metadata": {}}, "required": ["x", "y"]}
SAY = {"properties": {"message": {"type": "string"}, "loud": {"type": "boolean"}}, "required": ["message"]}


@pytest.mark.parametrize(
    ("schema", "reply", "action"),
    [
        (SAY, "true", {"message": "true"}),
        (GUESS, "LEFT ", {"guess": "LEFT"}),
        (MOVE, 'I go {"x": 1, "y": 2}.', {"x": 1, "y": 2}),
    ],
)
def test_an_answer_becomes_an_action(schema: dict[str, Any], reply: str, action: object) -> None:
    env = OpenEnv("http://127.0.0.1:9", score_range="any")
    env.read_schema(schema)
    assert env.action_of(reply) == action
    env.read_schema(MOVE)
    with pytest.raises(ActionRefusedError, match="the fields x, y"):
        env.action_of("{x: 1}")
