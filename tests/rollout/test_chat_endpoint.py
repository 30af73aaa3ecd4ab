"""Episodes with a model behind an OpenAI-compatible address: the same sessions and scores, messages instead of ids."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from typing import Any

import httpx
import pytest

from aitrain import TrainConfig
from aitrain.engines.chat_endpoint import RETRIES, ChatEndpoint
from aitrain.engines.sampling import Sampling
from aitrain.environment.contract import Case
from aitrain.environment.judges import model_judge
from aitrain.errors import RunFailed
from aitrain.rollout.engine import Decoding
from aitrain.rollout.episode import Episode
from aitrain.rollout.message_format import MessageFormat
from aitrain.training.training_batch import episode_record
from tests.rollout import scripted
from tests.rollout.scripted import Asks, Limits, assistant, cases, user

Answer = Callable[[dict[str, Any]], httpx.Response]
URL = "http://127.0.0.1:1/v1"


def said(text: str, tokens: int = 3, finish: str = "stop", **message: Any) -> httpx.Response:
    choice = {"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": tokens}})


class Server:
    """Answers with `answer`, and keeps the requests."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.bodies, self.headers = answer, list[dict[str, Any]](), list[httpx.Headers]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        self.headers.append(request.headers)
        return self.answer(self.bodies[-1])


def play(
    environment: object, server: Any, of: Sequence[Case] = (), limits: Limits | None = None,
    decoding: Decoding = Decoding.SEEDED, **options: Any,
) -> list[Episode]:  # fmt: skip
    chat, sampling = MessageFormat(), Sampling.of(TrainConfig(**options))
    engine = ChatEndpoint(URL, "some-model", chat, sampling)
    connections = model_judge._Connections()
    connections.client = httpx.AsyncClient(transport=httpx.MockTransport(server))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_judge, "_of_loop", defaultdict(lambda: connections))
        patch.setattr(model_judge, "FIRST_PAUSE", 0.0)
        return scripted.play(environment, engine, limits, of, chat, decoding=decoding, **options)


class Echo(Asks):
    """Scores whether the answer repeats the number that it was asked."""

    def score_episode(self, text: str, prompt: Any) -> float:
        asked = prompt if isinstance(prompt, str) else prompt[0]["content"]
        return float(text in asked)


class Guess(Asks):
    """Asks again until the answer is right."""

    def episode(self, case_idx: int) -> Generator[str | None, str, float]:
        reply = yield None
        while reply != "right":
            reply = yield "again"
        return 1.0


class Looks(Asks):
    """A tool, and a score for what it said."""

    def get_tools(self) -> list[Any]:
        return [self.look]

    def look(self, word: str) -> str:
        """Look a word up.

        Args:
            word: The word.
        """
        return f"{word} means blue"

    def score_episode(self, text: str) -> float:
        return float("blue" in text)


def test_messages_and_sampling_are_sent_and_the_answer_is_scored_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-from-the-environment")
    server = Server(lambda body: said("1?", tokens=7))
    episodes = play(Echo(), server, cases(2), rl_temperature=0.5, rl_stop="END")

    assert {one.result.score for one in episodes} == {0.0, 1.0}
    record = episode_record(episodes[1], step=0, weight_version=0)
    assert (record.tokens, record.completion, record.stop) == (7, "1?", "done")

    assert record.messages == [user("1?"), assistant("1?")]
    body = next(body for body in server.bodies if body["messages"][0]["content"] == "1?")
    seed = body.pop("seed")
    assert body == {
        "model": "some-model", "messages": [user("1?")], "temperature": 0.5, "top_p": 1.0,
        "stop": ["END"], "max_tokens": 99,
    }  # fmt: skip
    assert seed != next(body for body in server.bodies if body["messages"][0]["content"] == "0?")["seed"]
    assert server.headers[0]["authorization"] == "Bearer sk-from-the-environment"


def test_greedy_decoding_is_temperature_0_without_a_seed_and_a_string_prompt_is_a_message_of_the_user() -> None:
    server = Server(lambda body: said("0?"))
    (episode,) = play(Echo(), server, cases(chat=False), decoding=Decoding.GREEDY)
    assert server.bodies[0]["temperature"] == 0.0
    assert "seed" not in server.bodies[0]
    assert server.bodies[0]["messages"] == [user("0?")]
    assert episode.result.score == 1.0


def test_several_turns_are_one_conversation_and_token_limits_count_the_servers_tokens() -> None:
    server = Server(lambda body: said("right" if len(body["messages"]) == 5 else "wrong", tokens=4))
    (episode,) = play(Guess(), server)
    assert (episode.result.score, episode.stop, episode.trajectory.sampled_tokens) == (1.0, "done", 12)
    texts = [message["content"] for message in server.bodies[2]["messages"]]
    assert texts == ["0?", "wrong", "again", "wrong", "again"]
    (short,) = play(Guess(), Server(lambda body: said("wrong", tokens=4)), limits=Limits(9, 99, episode_tokens=9))
    (cut_off,) = play(Echo(), Server(lambda body: said("so lo", finish="length")))
    assert (short.stop, cut_off.stop) == ("truncated", "max_tokens")


def test_tools_are_offered_and_their_results_are_joined_to_the_calls() -> None:
    call = {"id": "x1", "type": "function", "function": {"name": "look", "arguments": '{"word": "azul"}'}}

    def answer(body: dict[str, Any]) -> httpx.Response:
        last = body["messages"][-1]
        return said(last["content"]) if last["role"] == "tool" else said("", tool_calls=[call])

    server = Server(answer)
    (episode,) = play(Looks(), server)
    assert (episode.result.score, episode.tool_calls) == (1.0, 1)
    assert server.bodies[0]["tools"][0]["function"]["name"] == "look"
    _, asked, result = server.bodies[1]["messages"]
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == {"word": "azul"}
    assert (result["tool_call_id"], result["content"]) == (asked["tool_calls"][0]["id"], "azul means blue")


def test_tool_calls_that_the_server_leaves_in_the_text_are_read_and_broken_ones_are_answered() -> None:
    texts = iter(['<tool_call>{"name": "look", "arguments": {"word": "rojo"}}</tool_call>', "blue"])
    (episode,) = play(Looks(), Server(lambda body: said(next(texts))))
    assert (episode.tool_calls, episode.result.score) == (1, 1.0)
    broken = [{"type": "function", "function": {"name": "look", "arguments": "{"}}]
    answers = iter([said("", tool_calls=broken), said("blue")])
    (wrong,) = play(Looks(), Server(lambda body: next(answers)))
    assert (wrong.wrong_tool_calls, wrong.result.score) == (1, 1.0)


def test_a_busy_or_failing_server_is_asked_again() -> None:
    answers = iter([httpx.Response(429), httpx.Response(503), said("0?")])
    (episode,) = play(Echo(), Server(lambda body: next(answers)))
    assert episode.result.score == 1.0


@pytest.mark.parametrize(
    ("status", "message", "advice"),
    [
        (401, "no", "OPENAI_API_KEY"),
        (404, "no such model", "status 404: .*no such model"),
        (400, "This model's maximum context length is 512 tokens", "context length is 512 tokens"),
    ],
)
def test_a_refusal_is_not_repeated(status: int, message: str, advice: str) -> None:
    server = Server(lambda body: httpx.Response(status, json={"error": {"message": message}}))
    with pytest.raises(RunFailed, match=advice):
        play(Echo(), server)
    assert len(server.bodies) == 1


def test_a_server_that_refuses_max_tokens_gets_max_completion_tokens() -> None:
    refusal = httpx.Response(400, json={"error": {"message": "use max_completion_tokens instead"}})
    server = Server(lambda body: refusal if "max_tokens" in body else said("0?"))
    assert all(episode.result.failure is None for episode in play(Echo(), server, cases(3)))
    assert server.bodies[-1]["max_completion_tokens"] == 99


@pytest.mark.parametrize(
    "content", [b"<html>", b"[]", b'{"choices": []}', b'{"choices": [{"message": {"content": 7}}]}']
)
def test_an_answer_that_is_no_chat_completion_ends_the_eval(content: bytes) -> None:
    with pytest.raises(RunFailed, match=r"gave no chat completion|does not answer in JSON"):
        play(Echo(), Server(lambda body: httpx.Response(200, content=content)))


def test_an_address_that_never_ends_its_answer_is_asked_again_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitrain.engines.chat_endpoint.DEADLINE", 0.01)

    asked = list[httpx.Request]()

    async def hang(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        await asyncio.sleep(60)
        raise AssertionError

    with pytest.raises(RunFailed, match=r"did not answer within 0.01 s\nStart the eval again"):
        play(Echo(), hang)
    assert len(asked) == RETRIES + 1


def test_a_key_that_cannot_be_sent_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-two\nlines-of-it")
    with pytest.raises(RunFailed, match="OPENAI_API_KEY has characters") as refused:
        play(Echo(), Server(lambda body: said("0?")))
    assert "sk-" not in str(refused.value)
