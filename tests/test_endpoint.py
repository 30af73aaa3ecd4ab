"""The OpenAI-compatible address of a `rollout`: real requests of an HTTP client to the scripted policy."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.rollout.scripted import Asks, Limits, cases, play_one, play_with_notes, user
from tests.test_rollout_session import echo

Ask = Callable[..., httpx.Response]


def client_of(endpoint: Any) -> httpx.Client:
    return httpx.Client(
        base_url=endpoint.base_url, headers={"Authorization": f"Bearer {endpoint.api_key}"}, timeout=None
    )


def said(response: httpx.Response) -> dict[str, Any]:
    response.raise_for_status()
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


class ByHttp(Asks):
    """Runs a function with the endpoint and `ask(messages, **fields)`, in a thread; the function returns the score."""

    def __init__(self, body: Callable[[Any, Ask], float | None]) -> None:
        self.body = body

    def rollout(self, endpoint: Any) -> float | None:
        with client_of(endpoint) as client:

            def ask(messages: Any, **fields: Any) -> httpx.Response:
                body = {"model": endpoint.model, "messages": messages, **fields}
                return client.post("/chat/completions", json=body)

            return self.body(endpoint, ask)


def test_an_answer_has_openais_format_with_the_true_numbers_of_tokens() -> None:
    def body(endpoint: Any, ask: Ask) -> float:
        answer = ask([user("one")]).json()
        assert {key: answer[key] for key in ("object", "model")} == {"object": "chat.completion", "model": "policy"}
        message = {"role": "assistant", "content": "1"}
        assert answer["choices"] == [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}]
        assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10}
        return float(said(ask([user("one"), message, user("two")]))["content"])

    episode = play_one(ByHttp(body), echo(), rl_score_range="any")
    assert (episode.result.score, episode.failure_message) == (2.0, "")
    assert "".join(map(chr, episode.trajectory.ids)) == "1$u:two$a:2$"


# -- what is refused


def refused(response: httpx.Response) -> tuple[int, str | None]:
    error = response.json()["error"]
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    return response.status_code, error["code"]


def test_a_limit_is_an_error_of_the_context_length_and_scores_0_if_it_is_not_caught() -> None:
    caught: list[Any] = []

    def body(endpoint: Any, ask: Ask) -> float:
        messages = [user("go")]
        while True:
            response = ask(messages)
            if response.is_error:
                caught.append(refused(response))
            messages += [said(response), user("on")]

    episode = play_one(ByHttp(body), echo(), Limits(2, 9))
    assert caught == [(400, "context_length_exceeded")]
    assert (episode.stop, episode.result.score, episode.failure_message) == ("max_turns", 0.0, "")


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"json": {"model": "gpt-5", "messages": [user("x")]}}, (404, "model_not_found")),
        (
            {"json": {"model": "policy", "messages": [{**user(""), "content": [{"type": "image_url"}]}]}},
            (400, None),
        ),
        ({"json": {"model": "policy", "messages": [user("x")], "stream": True}}, (400, None)),
        ({"content": b"{"}, (400, None)),
        ({"content": b"[]"}, (400, None)),
        ({"json": {}, "headers": {"Authorization": "Bearer no"}}, (401, "invalid_api_key")),
    ],
    ids=range(6),
)
def test_a_wrong_request_is_refused_in_openais_format_and_the_episode_goes_on_until_its_end(
    request_: dict[str, Any], expected: Any
) -> None:
    used: list[Any] = []

    def body(endpoint: Any, ask: Ask) -> float:
        used.append(endpoint)
        with client_of(endpoint) as client:
            assert refused(client.post("/chat/completions", **request_)) == expected
        return float(said(ask([user("first")]))["content"])

    episode = play_one(ByHttp(body), echo())
    assert (episode.result.score, episode.failure_message) == (1.0, "")
    with client_of(used[0]) as client:
        late = client.post("/chat/completions", json={"model": "policy", "messages": [user("late")]})
        assert refused(late) == (410, "episode_over")


# -- many at once


def test_many_episodes_ask_at_the_same_time_from_other_processes() -> None:
    home = os.getpid()

    def body(endpoint: Any, ask: Ask) -> float:
        assert os.getpid() != home
        messages = [user("one")]
        messages += [said(ask(messages)), user("two")]
        return float(said(ask(messages))["content"]) / 2

    episodes, _ = play_with_notes(ByHttp(body), echo(), of=cases(12), rl_env_isolation="process")
    assert [(episode.result.score, episode.failure_message) for episode in episodes] == [(1.0, "")] * 12
