"""Environments behind `aitrain env serve`: what is played there is what is played here."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import httpx
import pytest

from aitrain import ConfigError, EnvironmentFailed, TrainConfig
from aitrain.environment import env_service, served_environment
from aitrain.environment.contract import ScoreResult, env_kind
from aitrain.environment.dataset import build_cases
from aitrain.environment.loader import load_env
from aitrain.environment.runner import EnvRunner, start_runner
from aitrain.environment.served_environment import ServedEnvironment, connect
from aitrain.environment.session import AssistantTurn, Group
from aitrain.environment.tools import Tools
from aitrain.jobs import env_terminal
from aitrain.redaction import to_jsonable
from aitrain.rollout.episode import Episode
from aitrain.runs.environment_source import kept_files
from aitrain.workbench.check.registry import chosen, run_check
from aitrain.workbench.check.subject import Subject
from aitrain.workbench.opening import open_environment
from aitrain.workbench.player import JUNK, Player
from tests.rollout.scripted import Scripted, play_with_notes
from tests.runner_calls import end, open_sessions, respond
from tests.served.environments import Counts, Fails, Generator, Loop, Objects, Single, WithTools
from tests.served.running import Running, served

TOKEN = "a-token"
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


KINDS = (Single, WithTools, Generator, Loop)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AITRAIN_ENV_TOKEN", TOKEN)


@pytest.mark.parametrize(
    ("kind", "isolation"),
    [*((kind, "thread") for kind in KINDS), (WithTools, "process")],
)
def test_episodes_on_a_server_are_those_of_the_environment_itself(kind: Any, isolation: str) -> None:
    local, here = kind(), [1, 0, 3, 1]
    of = list(build_cases(local, None)[0])
    expected, _ = play_with_notes(local, Scripted(answer), of=[of[min(n, len(of) - 1)] for n in here])
    with served(kind(), rl_env_isolation=isolation) as client:
        rows = list(build_cases(client, None)[0])
        played, notes = play_with_notes(client, Scripted(answer), of=[rows[min(n, len(rows) - 1)] for n in here])
        assert (type(client).__name__, env_kind(client)) == (kind.__name__, env_kind(local))
        assert client.requirements.isolation is None  # the server's own
        for name in ("build_eval_dataset", "score_group", "get_tools"):
            assert hasattr(client, name) == hasattr(local, name), name
        assert Tools.of(client).schemas == Tools.of(local).schemas
    assert [shown(one) for one in played] == [shown(one) for one in expected]
    assert {one.result.failure for one in played} == {None}
    assert notes == []


def test_rows_come_in_the_form_of_the_records() -> None:
    local, _ = build_cases(Single(), None)
    with served(Single()) as client:
        train, held_out = build_cases(client, None)
    assert [dict(case.row) for case in train] == [to_jsonable(case.row) for case in local]
    assert held_out[0].row["case_idx"] == ["held", 0]


def test_groups_are_scored_on_the_server() -> None:
    def scored(environment: Any) -> object:
        case = build_cases(environment, None)[0][1]
        with closing(Player(EnvRunner(environment, TrainConfig()))) as player:
            played, failed = player.play([(case, JUNK)] * 2, [0, 1])
            failed.result = ScoreResult(None)
            group = Group(case, [played.as_member, failed.as_member])
            return asyncio.run(player.runner.score_group(group))

    with served(WithTools()) as client:
        assert scored(client) == scored(WithTools())


def runner_of(client: ServedEnvironment, **options: Any) -> EnvRunner:
    return start_runner(client, TrainConfig(**options))


def test_a_failure_has_its_kind_and_the_line_of_the_servers_code_and_calls_that_hang_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with closing(Running(Fails())) as server:
        client = connect(server.url)
        cases = list(build_cases(client, None)[0])
        played, _ = play_with_notes(client, Scripted(answer), of=cases, rl_env_timeout=1.0)
        (wider,), _ = play_with_notes(client, Scripted(answer), of=[cases[2]], rl_score_range="0,3")
        monkeypatch.setattr(env_service, "ABANDONED_LIMIT", 1)
        (refused,), _ = play_with_notes(client, Scripted(answer), of=[cases[4]])
    assert "restart with --rl-env-isolation process" in refused.failure_message
    assert wider.result.score == 2.0  # the range is that of the training
    results = [episode.result for episode in played]
    assert [result.score for result in results] == [None] * 4 + [1.0]
    failures = [result.failure for result in results if result.failure]
    assert [failure.kind for failure in failures] == ["raised", "timed_out", "out_of_range", "raised"]
    said = ("environments.py, line", "threading.Event().wait()", "", "cannot be served")
    assert all(words in failure.message for words, failure in zip(said, failures, strict=True))
    assert server.episodes == 0


# -- connections, deadlines, servers that end


def test_a_call_whose_answer_is_lost_is_missing_data_and_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Counts()
    with served(environment) as client:
        cases, exchange = list(build_cases(client, None)[0]), served_environment.exchange

        def lose_the_first(*given: Any, **named: Any) -> Any:
            found = exchange(*given, **named)
            if environment.count == 1:
                raise httpx.ReadError("lost")
            return found

        monkeypatch.setattr(served_environment, "exchange", lose_the_first)
        played, _ = play_with_notes(client, Scripted(answer), of=cases[:2], rl_env_workers=1)
    assert [episode.result.score for episode in played] == [None, 0.02]
    assert "ReadError: lost" in played[0].failure_message


def test_a_call_that_takes_longer_than_the_silence_of_a_lost_server_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(Counts):
        def score_episode(self, text: str) -> float:
            time.sleep(1.0)
            return 1.0

    monkeypatch.setattr(served_environment, "SILENCE_SECONDS", 0.4)
    monkeypatch.setattr(env_service, "ALIVE_SECONDS", 0.1)
    with served(Slow()) as client:
        (played,), _ = play_with_notes(client, Scripted(answer), of=list(build_cases(client, None)[0])[:1])
    assert played.result.score == 1.0


def test_a_server_that_ends_costs_the_episodes_on_it_and_one_that_returns_plays_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_environment, "RETRY_SECONDS", 0.02)
    server = Running(Objects())
    client = connect(server.url)
    with closing(runner_of(client, rl_env_timeout=1.0)) as runner:
        cases, port = build_cases(client, None)[0], server.port
        sessions = open_sessions(runner, cases[:2], [0, 1])
        server.close()
        respond(runner, sessions[:1], [AssistantTurn("a")])
        with closing(Running(Objects(), port)):
            respond(runner, sessions[1:], [AssistantTurn("a")])
            gone, unknown = (str(session.failure) for session in sessions)
            assert "was not answered" in gone
            assert "does not have the episode" in unknown
            end(runner, sessions)
            later = open_sessions(runner, cases[:1], [0])
            assert later[0].failure is None
            end(runner, later)


def test_a_player_waits_for_a_server_that_is_gone_no_longer_than_a_training_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env_terminal.signal, "signal", lambda *of_signal: None)
    monkeypatch.setattr(env_terminal, "play", lambda opened, *rest: {"seconds": opened.runner.config.rl_env_timeout})
    with closing(Running(Counts())) as server:
        assert env_terminal._play({"options": {"rl_env": server.url}, "play": {}}) == {"seconds": 60.0}


def test_episodes_are_spread_over_servers_and_leave_one_that_is_gone_or_refuses_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(served_environment, "RETRY_SECONDS", 0.02)
    first, second = Running(Objects()), Running(Objects())
    client = connect(f"{first.url}, {second.url}/")
    with closing(second), closing(runner_of(client)) as runner:
        cases, port = build_cases(client, None)[0], first.port

        def opened() -> tuple[int, int]:
            sessions = open_sessions(runner, cases[:6], range(6))
            assert [session.failure for session in sessions] == [None] * 6
            counts = first.episodes, second.episodes
            end(runner, sessions)
            return counts

        assert opened() == (3, 3)
        assert (first.episodes, second.episodes) == (0, 0)
        first.close()
        assert opened() == (0, 6)
        with closing(Running(Objects(rows=3), port)) as first:  # another environment
            assert opened() == (0, 6)


def test_sessions_without_a_call_for_long_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Objects()
    with (
        closing(Running(environment)) as server,
        closing(runner_of(connect(server.url))) as runner,
    ):
        open_sessions(runner, build_cases(runner.environment, None)[0][:3], range(3))
        server.run(server.service.end_idle())
        assert server.episodes == 3
        monkeypatch.setattr(env_service, "IDLE_SECONDS", -1.0)
        server.run(server.service.end_idle())
        assert server.episodes == 0
    assert all(environment.closed.acquire(timeout=10) for _ in range(3))


def test_the_session_of_a_client_that_is_gone_during_a_call_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    class Waits(Objects):
        def start(self, case_idx: int) -> Any:
            episode = super().start(case_idx)
            episode.step = lambda reply: over.wait(20)
            return episode

    monkeypatch.setattr(served_environment, "SILENCE_SECONDS", 0.5)
    with (
        closing(Running(Waits())) as server,
        closing(runner_of(connect(server.url))) as runner,
    ):
        sessions = open_sessions(runner, build_cases(runner.environment, None)[0][:1], [0])
        respond(runner, sessions, [AssistantTurn("a")])
        assert "ReadTimeout" in str(sessions[0].failure)
        over.set()
        monkeypatch.setattr(env_service, "IDLE_SECONDS", -1.0)
        end = time.monotonic() + 10.0
        while server.episodes and time.monotonic() < end:
            time.sleep(0.05)
            server.run(server.service.end_idle())
        assert server.episodes == 0


# -- who is answered


def status(url: str, authorization: str) -> int:
    return httpx.get(url, headers={"Authorization": authorization}, trust_env=False).status_code


def test_only_clients_with_the_token_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Running(Single())) as server:
        for path in ("environment", "rows", "nothing"):
            for given in ("", "Bearer", "Bearer another"):
                assert status(f"{server.url}/v1/{path}", given) == 401
        assert status(f"{server.url}/v1/environment", f"Bearer {TOKEN}") == 200
        monkeypatch.setenv("AITRAIN_ENV_TOKEN", "another")
        with pytest.raises(EnvironmentFailed, match=r"token is wrong.*\nStart it with .* same AITRAIN_ENV_TOKEN"):
            connect(server.url)
        monkeypatch.delenv("AITRAIN_ENV_TOKEN")
        with pytest.raises(ConfigError, match="Set the variable AITRAIN_ENV_TOKEN"):
            connect(server.url)


def test_servers_of_another_protocol_or_of_different_environments_are_refused() -> None:
    with closing(Running(Single())) as server, closing(Running(Objects())) as other:
        with pytest.raises(EnvironmentFailed, match="different environments"):
            connect(f"{server.url},{other.url}")
        server.service._description = json.dumps({**json.loads(server.service._description), "protocol": 9}).encode()
        with pytest.raises(EnvironmentFailed, match="protocol Input should be 8"):
            connect(server.url)
    with pytest.raises(EnvironmentFailed, match=r"cannot be used: ConnectError.*\nStart it with .* aitrain env serve"):
        connect(server.url)


def test_a_url_with_credentials_and_settings_of_a_server_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="holds credentials"):
        load_env(TrainConfig(rl_env="http://me:secret@host:1"))
    with pytest.raises(ConfigError, match="unexpected keyword argument 'size'"):
        load_env(TrainConfig(rl_env="http://host:1", rl_env_config={"size": 3}))


# -- what is recorded and checked


def test_no_file_of_a_server_is_kept_outside_of_the_folder() -> None:
    with served(Single()) as client:
        files = tuple({"name": name, "text": ""} for name in ("../a.py", "/etc/a.py", "b/c.py"))
        client.description = replace(client.description, source=files)
        assert [file["name"] for file in kept_files(client)] == ["b/c.py"]


def test_rows_that_were_built_with_another_tokenizer_are_refused() -> None:
    class Other:
        name_or_path = "models/other"

    with served(Single()) as client:
        client.description = replace(client.description, tokenizer="org/one")
        with pytest.raises(EnvironmentFailed, match=r"tokenizer of org/one.*\n.* --tokenizer models/other"):
            build_cases(client, Other())


def test_checks_of_the_process_of_an_environment_that_a_server_has_are_not_made() -> None:
    with closing(Running(Single())) as server:
        opened = open_environment(TrainConfig(rl_env=server.url), None)
        with closing(Subject(opened)) as subject:
            checks = chosen(["side-effects", "repeatable-dataset", "pickling"])
            assert all(run_check(subject, check).skipped for check in checks)
