"""HTTP calls of a vLLM server, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aitrain.errors import ServerGoneError, ServerRefusedError, ServerTimeoutError
from aitrain.vllm.client import VLLMClient

Respond = Callable[[], Awaitable[tuple[str, str] | None]]
"""Status line and JSON text of the next response; None: the connection is closed without one."""


@asynccontextmanager
async def serving(respond: Respond, deadline: float = 20.0) -> AsyncIterator[VLLMClient]:
    """A client of a server that answers each request so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = [line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        await reader.readexactly(int(length[0]) if length else 0)
        response = await respond()
        if response is not None:
            status, body = response
            lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", "", body]
            writer.write("\r\n".join(lines).encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = VLLMClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", deadline)
    async with server:
        yield client
        await client.close()


def called(status: str = "200 OK", body: str = "{}", deadline: float = 20.0) -> Any:
    """What a call returns if the server says so."""

    async def respond() -> tuple[str, str]:
        return status, body

    async def call() -> Any:
        async with serving(respond, deadline) as client:
            return await client.post("/path", {"a": 1})

    return asyncio.run(call())


def test_a_call_returns_the_content_of_the_response() -> None:
    assert called(body='{"answer": [1, 2]}') == {"answer": [1, 2]}


def test_more_calls_wait_at_the_same_time_than_a_client_has_connections_by_default() -> None:
    count = 150

    async def play() -> list[Any]:
        all_wait, waiting = asyncio.Event(), 0

        async def respond() -> tuple[str, str]:
            nonlocal waiting
            waiting += 1
            if waiting == count:
                all_wait.set()
            await all_wait.wait()
            return "200 OK", "1"

        async with serving(respond) as client:
            return await asyncio.gather(*(client.get("/path") for _ in range(count)))

    assert asyncio.run(play()) == [1] * count


def test_a_server_that_does_not_answer_has_a_deadline() -> None:
    async def call() -> None:
        async with serving(lambda: asyncio.sleep(60), deadline=0.05) as client:
            await client.post("/v1/completions", {})

    with pytest.raises(ServerTimeoutError, match="did not answer /v1/completions within 0 seconds"):
        asyncio.run(call())


def test_a_connection_that_is_closed_without_a_response_is_a_server_that_is_gone() -> None:
    async def call() -> None:
        async with serving(lambda: asyncio.sleep(0)) as client:
            assert not await client.is_up()
            await client.get("/path")

    with pytest.raises(ServerGoneError, match="/path: RemoteProtocolError"):
        asyncio.run(call())


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://"])
def test_no_server_is_a_server_that_is_gone(url: str) -> None:
    assert not asyncio.run(VLLMClient(url).is_up())
    with pytest.raises(ServerGoneError, match=r"^/path: "):
        asyncio.run(VLLMClient(url).get("/path"))


def test_a_server_error_is_a_server_that_is_gone() -> None:
    with pytest.raises(ServerGoneError, match=r"^/path: 500: its engine is dead$"):
        called("500 Error", '{"error": {"message": "its engine\\nis dead"}}')


@pytest.mark.parametrize("body", ['{"error": {"message": "too long"}}', '{"detail": "too long"}', "too long"])
def test_a_request_that_is_refused_says_why(body: str) -> None:
    with pytest.raises(
        ServerRefusedError, match=r"^The vLLM server at http://127.0.0.1:\d+ refuses /path: 400: too long$"
    ):
        called("400 Bad", body)


def test_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert called(body="[]") == []
