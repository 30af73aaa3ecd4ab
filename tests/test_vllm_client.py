"""HTTP calls of a vLLM server, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
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


def test_a_call_returns_the_content_of_the_response_and_uses_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
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
        async with serving(asyncio.Event().wait, deadline=0.05) as client:  # type: ignore[arg-type]
            await client.post("/v1/completions", {})

    with pytest.raises(ServerTimeoutError, match="/v1/completions"):
        asyncio.run(call())


@pytest.mark.parametrize(
    ("status", "body", "kind", "why"),
    [
        ("500 Error", '{"error": {"message": "its engine\\nis dead"}}', ServerGoneError, "500: its engine is dead"),
        ("400 Bad", '{"detail": "too long"}', ServerRefusedError, "400: too long"),
        ("400 Bad", "too long", ServerRefusedError, "400: too long"),
    ],
)
def test_an_answer_that_is_an_error_says_why(status: str, body: str, kind: type[Exception], why: str) -> None:
    with pytest.raises(kind, match=f"/path: {why}$"):
        called(status, body)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "nonsense", "http://"])
def test_no_server_is_a_server_that_is_gone(url: str) -> None:
    assert not asyncio.run(VLLMClient(url).is_up())
    with pytest.raises(ServerGoneError, match=r"^/path: "):
        asyncio.run(VLLMClient(url).get("/path"))


def test_the_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str | None] = []

    async def respond(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers.get("authorization"))
        return httpx.Response(200, json={})

    for key in ("", "the-key"):
        monkeypatch.setenv("VLLM_API_KEY", key)
        asyncio.run(VLLMClient("http://server:1", transport=httpx.MockTransport(respond)).get("/v1/models"))
    assert keys == [None, "Bearer the-key"]
