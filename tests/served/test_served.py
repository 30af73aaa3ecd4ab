"""Environments behind `aitrain env serve`: what is played there is what is played here."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aitrain import ConfigError, EnvironmentFailed, TrainConfig
from aitrain.environment import env_connection, env_http, env_service, served_session
from aitrain.environment.contract import Transcript, check_contract, env_kind
from aitrain.environment.dataset import build_cases, columns
from aitrain.environment.env_connection import checked_urls
from aitrain.environment.env_http import EnvHttpServer
from aitrain.environment.episode_group import Group
from aitrain.environment.group_scoring import score_groups
from aitrain.environment.locator import check_by_reading, find_env
from aitrain.environment.requirements import with_requirements
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.environment.served_environment import ServedEnvironment, connect
from aitrain.environment.session import AssistantTurn
from aitrain.environment.tools import Tools
from aitrain.environment.wire_format import PROTOCOL, TOKEN_VARIABLE, EnvCall, encode, env_token
from aitrain.rollout.episode import Episode
from aitrain.runs.environment_source import kept_files
from aitrain.runs.run_folder import to_jsonable
from aitrain.workbench.check.before_training import check_quickly
from aitrain.workbench.check.registry import CHECKS, run_checks
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.opening import OpenedEnvironment
from aitrain.workbench.player import JUNK, Play, Player, reference_of
from tests.rollout.asking import play
from tests.rollout.scripted import Scripted
from tests.runner_calls import end, open_sessions, respond, score
from tests.served.environments import Fails, Generator, InOrder, Loop, Single, Speaks, Waits, WithTools
from tests.served.running import Running, served

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>$'


def answer(so_far: str) -> str:
    """Two tool calls, or what depends on all that was said."""
    return CALL if so_far.count("a:") < 3 and len(so_far) % 2 else f"{len(so_far)}$"


def shown(episode: Episode) -> object:
    """All of an episode but its time."""
    trajectory, result = episode.trajectory, episode.result
    said = (trajectory.prompt_ids, trajectory.ids, trajectory.mask, trajectory.logprobs, trajectory.stop)
    counts = (episode.tool_calls, episode.wrong_tool_calls, episode.stop)
    return said, episode.conversation, counts, result, to_jsonable(episode.case.row), to_jsonable(episode.case.case_idx)


KINDS = (Single, WithTools, Generator, Speaks, Loop)


@pytest.mark.parametrize(
    ("kind", "isolation"),
    [*((kind, "thread") for kind in (*KINDS, InOrder)), *((kind, "process") for kind in KINDS)],
)
def test_episodes_on_a_server_are_those_of_the_environment_itself(kind: Any, isolation: str) -> None:
    local, here = kind(), [1, 0, 3, 1]
    of = list(build_cases(local, None)[0])
    expected, _ = play(local, Scripted(answer), of=[of[min(n, len(of) - 1)] for n in here])
    with served(kind(), rl_env_isolation=isolation) as client:
        rows = list(build_cases(client, None)[0])
        played, notes = play(client, Scripted(answer), of=[rows[min(n, len(rows) - 1)] for n in here])
    assert [shown(one) for one in played] == [shown(one) for one in expected]
    assert {one.result.failure for one in played} == {None}
    assert notes == []  # those about the environment's state are the server's


def test_a_server_is_asked_for_its_own_cases_in_a_run_with_several_environments() -> None:
    for kind in (Single, Speaks):
        local = build_cases(kind(), None)[0]
        expected, _ = play(kind(), Scripted(answer), of=[local[1], local[0]])
        with served(kind()) as client:
            rows = replace(build_cases(client, None)[0], env="far", first=1)
            assert (rows[0].number, rows[0].own_number) == (1, 0)
            played, _ = play(client, Scripted(answer), of=[rows[1], rows[0]])
        assert [shown(one) for one in played] == [shown(one) for one in expected]


def test_a_served_environment_says_of_itself_what_the_environment_does() -> None:
    for local in (kind() for kind in KINDS):
        with served(local) as client:
            assert type(client).__name__ == type(local).__name__
            assert env_kind(client) == env_kind(local)
            for name in ("build_eval_dataset", "score_group", "get_tools", "reference"):
                assert hasattr(client, name) == hasattr(local, name), name
            assert Tools.of(client).schemas == Tools.of(local).schemas
            assert len(Tools.of(client)) == len(Tools.of(local))
            check_contract(client, columns(build_cases(client, None)))


def test_rows_come_in_pages_and_in_the_form_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_service, "PAGE_ROWS", 2)
    (local, held), odd = build_cases(Single(), None), build_cases(Single(), None)[0][0].row
    with served(Single()) as client:
        (train, other) = build_cases(client, None)
    assert [dict(case.row) for case in train] == [to_jsonable(case.row) for case in local]
    assert train[0].row["pair"] == [1, 2.5]
    assert odd["pair"] == (1, 2.5)
    assert held is not None
    assert other is not None
    assert (other[0].number, other[0].row["case_idx"]) == (held[0].number, ["held", 0])


class Numbered(Single):
    """Several rows have the same case_idx."""

    def build_dataset(self) -> list[Any]:
        return [{**row, "number": number} for number, row in enumerate(super().build_dataset())]

    def reference(self, case_idx: Any, number: int) -> str:
        return f"reference of {case_idx[1]}, {number}"


def test_references_are_found_by_what_clients_see_of_a_row() -> None:
    with served(Numbered()) as client:
        script = reference_of(client, build_cases(client, None)[0][3])
    assert script is not None
    assert script.replies == ("reference of 1, 3",)


def test_groups_are_scored_on_the_server() -> None:
    def scored(environment: Any) -> object:
        cases = replace(build_cases(environment, None)[0], first=1)
        with closing(Player(environment, TrainConfig())) as player:
            played = player.play([Play(cases[1], JUNK), Play(cases[1], JUNK, 1)])
            failed = replace(played[1], score=None)
            group = Group(cases[1], [played[0].as_member, failed.as_member])
            return asyncio.run(score_groups(player.runner, [group]))

    with served(WithTools()) as client:
        assert scored(client) == scored(WithTools())


def test_requirements_are_those_of_the_environment_but_its_isolation_is_the_servers() -> None:
    with served(Generator()) as client:
        config, note = with_requirements(TrainConfig(), client)
    assert (config.rl_max_turns, config.rl_env_isolation) == (3, "thread")
    assert note == "Generator requires --rl-max-turns 3."
    assert client.requirements.isolation is None


def runner_of(client: ServedEnvironment, **options: Any) -> EnvRunner:
    return start_runner(client, TrainConfig(**options))


@contextmanager
def playing(environment: Any, **options: Any) -> Iterator[tuple[Running, ServedEnvironment, EnvRunner]]:
    """A server, a client of it, and what plays there."""
    with ExitStack() as stack:
        server = stack.enter_context(closing(Running(environment)))
        client = stack.enter_context(closing(connect(server.url)))
        yield server, client, stack.enter_context(closing(runner_of(client, **options)))


def test_a_failure_has_its_kind_its_place_and_the_line_of_the_servers_code() -> None:
    with closing(Running(Fails())) as server, closing(connect(server.url)) as client:
        played, _ = play(client, Scripted(answer), of=list(build_cases(client, None)[0]), rl_env_timeout=1.0)
        raised, hung, text, too_high, asked, fine = (episode.result for episode in played)
    assert fine.score == 1.0
    failures = [result.failure for result in (raised, hung, text, too_high, asked)]
    assert [failure and failure.kind for failure in failures] == [
        "raised", "timed_out", "wrong_type", "out_of_range", "raised",
    ]  # fmt: skip
    assert {failure and failure.place for failure in failures} == {"score_episode"}
    assert raised.failure
    assert "environments.py, line" in raised.failure.message
    assert "KeyError" in raised.failure.trace
    assert hung.failure
    assert "no answer within 1 s" in hung.failure.message
    assert "threading.Event().wait()" in hung.failure.message
    assert asked.failure
    assert "cannot be served" in asked.failure.message
    assert [episode.stop for episode in played][:2] == ["env_error", "env_timeout"]
    assert len(server.notes) == 4  # the first of each kind
    assert server.episodes == 0


def test_an_environment_that_asks_the_model_fails_in_processes_of_the_server_too() -> None:
    with served(Fails(), rl_env_isolation="process") as client:
        (asked,), _ = play(client, Scripted(answer), of=[build_cases(client, None)[0][4]])
    assert asked.result.failure
    assert "cannot be served" in asked.result.failure.message


def test_the_score_range_is_that_of_the_training() -> None:
    for bounds, expected in (("0,1", None), ("0,3", 2.0), ("any", 2.0)):
        with served(Fails()) as client:
            cases = build_cases(client, None)[0]
            (episode,), _ = play(client, Scripted(answer), of=[cases[3]], rl_score_range=bounds)
        assert episode.result.score == expected


def test_what_json_cannot_hold_is_a_failure_of_the_episode() -> None:
    class Odd(Generator):
        def episode(self, seed: int, case_idx: int) -> Any:
            yield [{"role": "user", "content": [{"type": "image", "image": object()}]}]
            return 1.0

    with served(Odd()) as client, closing(runner_of(client)) as runner:
        (one,) = open_sessions(runner, [build_cases(client, None)[0][0]], [0])
        assert one.failure is not None
        assert (one.failure.kind, one.failure.message[:36]) == ("wrong_type", "said what cannot be written as JSON:")


# -- connections, deadlines, servers that end


def test_a_call_whose_connection_is_lost_is_sent_again_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_session, "RETRY_SECONDS", 0.01)
    environment = Waits()
    with playing(environment) as (server, client, runner):
        sessions = open_sessions(runner, [build_cases(client, None)[0][0]], [0])
        environment.go.clear()

        def cut() -> None:
            assert environment.began.acquire(timeout=10)
            server.cut_connections()
            environment.go.set()

        threading.Thread(target=cut).start()
        (response,) = respond(runner, sessions, [AssistantTurn("a")])
        assert response.is_over
        assert sessions[0].failure is None
        assert not environment.began.acquire(blocking=False)  # there was no second step
        end(runner, sessions)
        assert environment.closed.acquire(timeout=10)


def test_the_only_call_of_an_episode_is_made_once_also_if_its_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = list[str]()
    with served(InOrder()) as client:
        cases, exchange = list(build_cases(client, None)[0]), env_connection.EnvConnection._exchange

        def lose_the_first(self: Any, connection: Any, method: str, path: str, body: Any) -> Any:
            found = exchange(self, connection, method, path, body)
            if path == "/v1/environment":
                return found
            answers.append(path)
            if len(answers) == 1:
                raise ConnectionResetError("lost")
            return found

        monkeypatch.setattr(env_connection.EnvConnection, "_exchange", lose_the_first)
        played, _ = play(client, Scripted(answer), of=cases[:2])
    assert answers == ["/v1/score"] * 3
    assert [episode.result.score for episode in played] == [0.01, 0.02]


def test_connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_once, connected = env_connection.EnvConnection._connect, list[str]()

    def count(self: Any) -> Any:
        connected.append(self.url)
        return connect_once(self)

    monkeypatch.setattr(env_connection.EnvConnection, "_connect", count)
    with served(InOrder()) as client:
        played, _ = play(client, Scripted(answer), of=list(build_cases(client, None)[0]))
    assert len(connected) == 1  # the calls are made one after another
    assert [episode.result.score for episode in played] == [number / 100 for number in range(1, 9)]


def test_a_call_that_takes_long_is_known_to_be_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client takes a server without a byte for lost after SILENCE_SECONDS."""
    monkeypatch.setattr(env_http, "ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(env_connection, "SILENCE_SECONDS", 0.4)
    environment = Waits()
    with served(environment) as client, closing(runner_of(client)) as runner:
        sessions = open_sessions(runner, [build_cases(client, None)[0][0]], [0])
        environment.go.clear()
        threading.Timer(1.0, environment.go.set).start()
        respond(runner, sessions, [AssistantTurn("a")])
        assert sessions[0].failure is None
        assert sessions[0].seconds > 0.5  # the server's clock
        end(runner, sessions)


def test_a_server_that_ends_costs_the_episodes_on_it_and_one_that_returns_plays_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_session, "RETRY_SECONDS", 0.02)
    server = Running(Waits())
    with closing(connect(server.url)) as client, closing(runner_of(client, rl_env_timeout=1.0)) as runner:
        cases, port = build_cases(client, None)[0], server.port
        sessions = open_sessions(runner, cases[:2], [0, 1])
        server.close()
        respond(runner, sessions[:1], [AssistantTurn("a")])
        again = Running(Waits(), port)
        with closing(again):
            respond(runner, sessions[1:], [AssistantTurn("a")])
            failures = [session.failure for session in sessions]
            assert [failure and failure.kind for failure in failures] == ["server", "server"]
            assert failures[0]
            assert "was not answered" in failures[0].message
            assert failures[1]
            assert "does not have it any more" in failures[1].message
            end(runner, sessions)
            later = open_sessions(runner, cases[:1], [0])
            respond(runner, later, [AssistantTurn("a")])
            assert later[0].failure is None
            end(runner, later)


@pytest.mark.slow
def test_a_server_that_returns_with_another_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_session, "RETRY_SECONDS", 0.02)
    server = Running(Waits())
    with closing(connect(server.url)) as client, closing(runner_of(client)) as runner:
        cases, port = build_cases(client, None)[0], server.port
        server.close()
        with closing(Running(Waits(rows=3), port)):
            (one,) = open_sessions(runner, cases[:1], [0])
            assert one.failure is not None
            assert "now serves another environment (Waits, 3 rows)" in one.failure.message
            with pytest.raises(EnvironmentFailed, match="restarted with another environment"):
                build_cases(client, None)


def test_episodes_are_spread_over_servers_and_leave_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_session, "RETRY_SECONDS", 0.02)
    first, second = Running(Waits()), Running(Waits())
    client = connect(f"{first.url}, {second.url}/")
    with closing(second), closing(client), closing(runner_of(client)) as runner:
        cases = build_cases(client, None)[0]
        sessions = open_sessions(runner, cases[:6], range(6))
        assert (first.episodes, second.episodes) == (3, 3)
        end(runner, sessions)
        assert (first.episodes, second.episodes) == (0, 0)
        first.close()
        sessions = open_sessions(runner, cases[:6], range(6))
        assert [session.failure for session in sessions] == [None] * 6
        assert second.episodes == 6
        end(runner, sessions)


@pytest.mark.slow
def test_episodes_leave_a_server_that_refuses_them() -> None:
    """It plays the fewest episodes, as each of them ends at once."""
    first, second = Running(Waits()), Running(Waits())
    with closing(second), closing(connect(f"{first.url},{second.url}")) as client, closing(runner_of(client)) as runner:
        cases, port = build_cases(client, None)[0], first.port
        first.close()
        with closing(Running(Waits(rows=3), port)) as other:
            sessions = open_sessions(runner, cases[:6], range(6))
            assert [session.failure for session in sessions] == [None] * 6
            assert (other.episodes, second.episodes) == (0, 6)
            end(runner, sessions)


def test_a_call_is_sent_again_after_a_proxy_says_that_the_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_session, "RETRY_SECONDS", 0.01)
    send, answered = env_http._send, list[bytes]()

    def bad_gateway_first(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        if b'"protocol"' in body:  # the description
            return send(writer, status, body)
        answered.append(body)
        if len(answered) == 1:
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>")
        else:
            send(writer, status, body)

    with served(InOrder()) as client:
        cases = build_cases(client, None)[0]
        monkeypatch.setattr(env_http, "_send", bad_gateway_first)
        (episode,), _ = play(client, Scripted(answer), of=cases[:1])
    assert len(answered) == 2
    assert episode.result.score == 0.01  # it was made once


def test_a_call_that_took_long_can_be_sent_again_after_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_service, "CLIENT_SECONDS", 0.3)
    with playing(InOrder()) as (server, client, _), monkeypatch.context() as slow:
        service, score = server.service, server.runner.score_session
        slow.setattr(server.runner, "score_session", lambda *given: (time.sleep(0.5), score(*given))[1])
        call = EnvCall("one", 0, client.servers.id)
        for _ in range(2):
            answered = server.run(service.answer("client", "/v1/score", json.loads(encode(call))))
            assert json.loads(answered)["value"]["score"] == 0.01
            service.hear("client")
            server.run(service.end_lost())


def test_servers_of_different_environments_are_refused() -> None:
    with (
        closing(Running(Waits())) as one,
        closing(Running(Waits(rows=3))) as other,
        pytest.raises(EnvironmentFailed, match="serve different environments"),
    ):
        connect(f"{one.url},{other.url}")


def test_sessions_of_a_client_that_is_gone_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Waits()
    with playing(environment) as (server, client, runner):
        open_sessions(runner, build_cases(client, None)[0][:3], range(3))
        server.run(server.service.end_lost())
        assert server.episodes == 3
        monkeypatch.setattr(env_service, "CLIENT_SECONDS", -1.0)
        server.run(server.service.end_lost())
        assert server.episodes == 0
    assert all(environment.closed.acquire(timeout=10) for _ in range(3))
    assert server.notes == ["Ended 3 episodes of clients that are gone."]


def test_a_client_says_that_it_lives_while_its_episodes_wait_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_session, "CLIENT_SECONDS", 0.06)
    with playing(Waits()) as (server, client, runner):
        sessions = open_sessions(runner, build_cases(client, None)[0][:1], [0])
        server.service._heard.clear()
        until = time.monotonic() + 10
        while not server.service._heard and time.monotonic() < until:
            time.sleep(0.01)
        assert server.service._heard
        end(runner, sessions)


def test_many_episodes_at_once_are_played_and_two_trainings_do_not_disturb_each_other() -> None:
    with closing(Running(Waits(rows=80), rl_env_workers=8)) as server:
        clients = [connect(server.url) for _ in range(2)]
        scores = list[Any]()

        def train(client: ServedEnvironment) -> None:
            with closing(runner_of(client)) as runner:
                cases = list(build_cases(client, None)[0])
                sessions = open_sessions(runner, cases, range(len(cases)))
                respond(runner, sessions, [AssistantTurn("a")] * len(cases))
                scores.append([one.score for one in score(runner, sessions, [Transcript(c, "a") for c in cases])])
                end(runner, sessions)

        threads = [threading.Thread(target=train, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert scores == [[1.0] * 80] * 2
        assert server.episodes == 0


def test_new_episodes_are_refused_when_too_many_calls_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_service, "ABANDONED_LIMIT", 1)
    with served(Fails()) as client, closing(runner_of(client, rl_env_timeout=0.3)):
        cases = build_cases(client, None)[0]
        hanging, _ = play(client, Scripted(answer), of=[cases[1]], rl_env_timeout=0.3)
        refused, _ = play(client, Scripted(answer), of=[cases[5]])
    assert hanging[0].stop == "env_timeout"
    failure = refused[0].result.failure
    assert failure is not None
    assert "restart with --rl-env-isolation process" in failure.message


# -- who is answered


def ask(url: str, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    with closing(connection):
        token = {"Authorization": f"Bearer {env_token(url)}"}
        given = token | {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), given)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_a_server_without_a_token_makes_one_for_clients_of_its_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with closing(Running(Single())) as server:
        [file] = (path for path in tmp_path.rglob("*") if path.is_file())
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        for path in ("/v1/environment", "/v1/source", "/v1/rows", "/v1/nothing"):
            assert ask(server.url, "GET", path, Authorization="")[0] == 401
            assert ask(server.url, "GET", path, Authorization="Bearer ")[0] == 401
        assert ask(server.url, "GET", "/v1/source", Authorization=f"Bearer {file.read_text()}")[0] == 200
        connect(server.url).close()
        monkeypatch.setenv("HOME", str(tmp_path / "of another user"))
        with pytest.raises(EnvironmentFailed, match=r"token is wrong or missing.*\nSet AITRAIN_ENV_TOKEN"):
            connect(server.url)
        monkeypatch.setenv("HOME", str(tmp_path))
    assert not file.exists()


def test_a_token_is_needed_where_the_server_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a-long-secret-token")
    with closing(Running(Single())) as server:
        connect(server.url).close()
        monkeypatch.setenv(TOKEN_VARIABLE, "another")
        with pytest.raises(EnvironmentFailed, match=r"token is wrong or missing.*\nSet AITRAIN_ENV_TOKEN"):
            connect(server.url)
        assert ask(server.url, "GET", "/v1/rows")[0] == 401


def test_a_body_is_not_read_without_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "a-long-secret-token")
    with closing(Running(Single())) as server, socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        connection.sendall(b"POST /v1/alive HTTP/1.1\r\nContent-Length: 50000000\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")  # the rest was never sent


def test_a_request_that_is_refused_after_a_while_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_http, "ALIVE_SECONDS", 0.01)

    def fail(self: object, case_idx: object) -> None:
        time.sleep(0.1)
        raise KeyError("no such row")

    monkeypatch.setattr(Single, "reference", fail)
    with served(Single()) as client, pytest.raises(EnvironmentFailed, match="reference raised: KeyError: 'no such row"):
        reference_of(client, build_cases(client, None)[0][0])


def test_a_connection_is_closed_when_the_client_asks_for_it() -> None:
    with closing(Running(Single())) as server, socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        token = f"Authorization: Bearer {env_token(server.url)}\r\n"
        connection.sendall(f"GET /v1/source HTTP/1.1\r\n{token}Connection: close\r\n\r\n".encode())
        with connection.makefile("rb") as received:
            assert received.read().endswith(b'{"files":[{"name":"a.py","text":"x = 1"}]}')


def test_pages_of_a_browser_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with closing(Running(Single())) as server:
        assert ask(server.url, "GET", "/v1/environment")[0] == 200
        assert ask(server.url, "GET", "/v1/environment", Host="evil.example", Authorization="")[0] == 401
        assert ask(server.url, "POST", "/v1/alive", {}, Content_Type="text/plain")[0] == 415
        assert ask(server.url, "PUT", "/v1/alive", {})[0] == 405


def test_wrong_requests_are_answered_with_what_is_wrong() -> None:
    json_type = {"Content_Type": "application/json"}
    with closing(Running(Single())) as server:
        assert ask(server.url, "GET", "/v1/nothing") == (
            404,
            {"error": "there is no /v1/nothing", "status": 404},
        )
        assert ask(server.url, "GET", "/v1/rows?dataset=other")[0] == 404
        assert ask(server.url, "GET", "/v1/rows?start=99")[0] == 404
        assert ask(server.url, "GET", "/v1/rows?start=x")[0] == 400
        assert ask(server.url, "POST", "/v1/open", b"[" * 100_000, **json_type)[0] == 400
        assert ask(server.url, "POST", "/v1/open", b"{", **json_type)[0] == 400
        assert ask(server.url, "POST", "/v1/nothing", {}, **json_type)[0] == 404
        assert ask(server.url, "POST", "/v1/open", [], **json_type)[0] == 400
        assert ask(server.url, "POST", "/v1/open", {"session": 5}, **json_type)[0] == 400
        call = {"session": "s", "number": 0, "environment": server.service.description.id}
        assert ask(server.url, "POST", "/v1/score", {**call, "case": 99}, **json_type)[0] == 400
        assert ask(server.url, "POST", "/v1/respond", {**call, "session": "t"}, **json_type)[0] == 410
        assert ask(server.url, "POST", "/v1/reference", {"case_idx": 99}, **json_type)[0] == 404
        assert server.episodes == 0


def test_a_url_that_serves_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Running(Single())) as server:
        described = server.service.read("/v1/environment", {})
        for change, message in (
            ({"protocol": PROTOCOL + 1}, f"speaks version {PROTOCOL + 1} of the protocol"),
            ({"kind": "exec"}, "describes no environment"),
            ({"name": "a\x1bb"}, "describes no environment"),
            ({"train": "many"}, "is not one of aitrain env serve"),
        ):
            monkeypatch.setattr(server.service, "read", lambda *_, change=change: {**described, **change})
            with pytest.raises(EnvironmentFailed, match=message):
                connect(server.url)
    with pytest.raises(EnvironmentFailed, match=r"cannot be reached.*\nStart it first: aitrain env serve"):
        connect(server.url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://", "is not a URL"),
        ("http://host:99999", "is not a URL"),
        ("http://a:1,b:2", "is not a URL"),
        ("http://me:secret@host:1", "holds credentials"),
        ("http://host:1/?token=secret", "is not a URL"),
    ],
)
def test_a_wrong_url_is_refused_before_anything_starts(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_by_reading(find_env(TrainConfig(rl_env=url)), {})
    with pytest.raises(ConfigError, match="takes these keywords\nStart it with: aitrain env serve ENV --rl-env-config"):
        check_by_reading(find_env(TrainConfig(rl_env="http://host:1")), {"size": 3})


@pytest.mark.parametrize("token", ["two words", "ends with a line\n", "Schlüssel"])
def test_a_token_that_no_header_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)
    with pytest.raises(ConfigError, match="AITRAIN_ENV_TOKEN: a token has only ASCII"):
        checked_urls("http://host:1")
    with pytest.raises(ConfigError, match="AITRAIN_ENV_TOKEN: a token has only ASCII"):
        EnvHttpServer(None)  # type: ignore[arg-type]


def test_an_environment_of_a_server_does_not_run_on_ray() -> None:
    with pytest.raises(ConfigError, match="runs where its server is: give a number without ray"):
        TrainConfig(rl_env="http://host:1", rl_env_workers="ray:4")


# -- what is recorded and checked


def test_the_files_of_a_served_environment_are_kept_and_none_outside_of_a_folder() -> None:
    with closing(Running(Single())) as server, closing(connect(server.url)) as client:
        assert kept_files(client) == [{"name": "a.py", "text": "x = 1"}]
        server.service.source = [{"name": name, "text": ""} for name in ("../a.py", "/etc/a.py", "b/c.py")]
        assert [file["name"] for file in kept_files(client)] == ["b/c.py"]


def test_checks_of_the_environments_own_process_are_left_to_its_machine() -> None:
    with served(Single()) as client:
        subject = Subject(OpenedEnvironment(client, build_cases(client, None)[0]), TrainConfig())
        with closing(subject):
            results = {result.name: result for result in run_checks(subject, CHECKS)}
    left_out = [name for name, result in results.items() if "check it there" in result.skipped]
    assert left_out == ["side-effects", "repeatable-dataset", "two-ranks", "network", "signals", "pickling"]
    assert not results["reference"].skipped
    assert "itself failed" not in str(results)


def test_the_short_check_before_a_training_leaves_a_served_environment_out() -> None:
    with served(Single()) as client:
        found = check_quickly(client, build_cases(client, None)[0], TrainConfig(rl_env="http://host:1"))
    assert found.skipped == "a server has it (aitrain env check http://host:1 checks it)"


def test_rows_that_were_built_with_another_tokenizer_are_refused() -> None:
    class Other:
        name_or_path = "models/other"

    with closing(Running(Single())) as server, closing(connect(server.url)) as client:
        client.description = replace(client.description, tokenizer="org/one")
        with pytest.raises(EnvironmentFailed, match=r"tokenizer of org/one.*\n.* --tokenizer models/other"):
            build_cases(client, Other())
