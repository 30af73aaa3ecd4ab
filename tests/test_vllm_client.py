"""HTTP calls of a vLLM server, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from aitrain.errors import RunFailed, ServerGoneError, ServerRefusedError
from aitrain.vllm.client import VLLMClient


@asynccontextmanager
async def serving(is_ready: Callable[[], Awaitable[object]], deadline: float = 20.0) -> AsyncIterator[VLLMClient]:
    """A client of a server that says 1 to each request when it is ready."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await is_ready()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1\r\n\r\n1")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = VLLMClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", deadline)
    async with server:
        yield client
        await client.close()


def called(respond: Callable[[httpx.Request], httpx.Response]) -> Any:
    """What a call returns if the server says so."""
    client = VLLMClient("http://server:1", transport=httpx.MockTransport(respond))
    return asyncio.run(client.post("/path", {"a": 1}))


def test_more_calls_wait_at_the_same_time_than_a_client_has_connections_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count = 150

    async def play() -> list[Any]:
        all_wait, waiting = asyncio.Event(), 0

        async def is_ready() -> None:
            nonlocal waiting
            waiting += 1
            if waiting == count:
                all_wait.set()
            await all_wait.wait()

        async with serving(is_ready) as client:
            return await asyncio.gather(*(client.get("/path") for _ in range(count)))

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # is not asked
    assert asyncio.run(play()) == [1] * count


def test_a_server_that_does_not_answer_has_a_deadline() -> None:
    async def call() -> None:
        async with serving(asyncio.Event().wait, deadline=0.05) as client:
            await client.post("/v1/completions", {})

    with pytest.raises(RunFailed, match="/v1/completions"):
        asyncio.run(call())


@pytest.mark.parametrize(
    ("status", "body", "kind", "why"),
    [
        (500, '{"detail": "its engine is dead"}', ServerGoneError, '500: {"detail": "its engine is dead"}'),
        (400, "too \n long", ServerRefusedError, "400: too long"),
    ],
)
def test_an_answer_that_is_an_error_says_why(status: int, body: str, kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=f"/path: {why}$"):
        called(lambda _: httpx.Response(status, text=body))


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://"])
def test_no_server_is_a_server_that_is_gone(url: str) -> None:
    assert not asyncio.run(VLLMClient(url).is_up())
    with pytest.raises(ServerGoneError, match=r"^/path: "):
        asyncio.run(VLLMClient(url).get("/path"))


def test_a_call_sends_the_key_of_the_environment_and_returns_the_content(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, sent in (("", None), ("the-key", "Bearer the-key")):
        monkeypatch.setenv("VLLM_API_KEY", key)
        assert called(lambda request: httpx.Response(200, json=[request.headers.get("authorization")])) == [sent]
