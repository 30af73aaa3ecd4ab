"""One session of an OpenEnv server: its websocket, and the messages on it."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from aitrain.environment.adapters.env_server import CONNECT_SECONDS, is_local
from aitrain.environment.adapters.openenv_text import ActionRefusedError
from aitrain.environment.adapters.settings import JsonObject
from aitrain.errors import EnvironmentFailed


class OpenEnvSession:
    """One session, which lasts as long as its connection: an episode whose connection is lost fails."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._socket: Any = None

    async def open(self) -> None:
        """Connect.

        Raises:
            ConnectionError: there is no server.
        """
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        proxy = {"proxy": None} if is_local(self.url) else {}
        address = self.url.replace("http", "ws", 1) + "/ws"
        try:
            # without pings of ours, as a step may take longer than they wait; those of the server are answered
            self._socket = await connect(
                address, open_timeout=CONNECT_SECONDS, max_size=None, ping_interval=None, **proxy
            )
        except (OSError, WebSocketException) as error:
            raise ConnectionError(f"The OpenEnv server at {self.url} opens no session: {error}") from error

    async def refusal(self) -> str:
        """Open the session; returns why the server refuses it, empty if it does not."""
        await self.open()
        answer = await self._exchange({"type": "state"})  # a full server says so in its first answer
        return str(answer["data"].get("message")) if _code(answer) == "CAPACITY_REACHED" else ""

    async def ask(self, kind: str, data: JsonObject) -> JsonObject:
        """The data of the answer to a message.

        Raises:
            ActionRefusedError: the data do not fit the server's schema.
            ConnectionError: the connection is lost, or the server has no session left.
            RuntimeError: the environment raised.
        """
        answer = await self._exchange({"type": kind, "data": data})
        code, content = _code(answer), answer["data"]
        if code == "VALIDATION_ERROR":
            problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in content.get("errors", [])]
            raise ActionRefusedError("; ".join(problems) or str(content.get("message")))
        if code == "CAPACITY_REACHED":
            raise ConnectionError(f"The OpenEnv server at {self.url} has no session left: {content.get('message')}")
        if code:
            raise RuntimeError(f"{kind} failed on the OpenEnv server: {code}: {content.get('message')}")
        return dict(content)

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _exchange(self, message: JsonObject) -> JsonObject:
        from websockets.exceptions import ConnectionClosed

        try:
            with suppress(ConnectionClosed):  # what the server said before it closed can still be read
                await self._socket.send(json.dumps(message))
            return dict(json.loads(await self._socket.recv()))
        except ConnectionClosed as error:
            raise ConnectionError(f"The OpenEnv server at {self.url} closed the session: {error}") from error


async def check_sessions(url: str, needed: int) -> None:
    """Open as many sessions as episodes need at once, and close them.

    Raises:
        EnvironmentFailed: the server allows fewer.
    """
    sessions = [OpenEnvSession(url) for _ in range(needed)]
    try:
        refusals = [why for why in await asyncio.gather(*(one.refusal() for one in sessions)) if why]
    finally:
        await asyncio.gather(*(one.close() for one in sessions))
    if refusals:
        allowed = needed - len(refusals)
        raise EnvironmentFailed(
            f"The OpenEnv server at {url} allows {allowed} of {needed} sessions at once: {refusals[0]}\n"
            f"Start it with create_app(..., max_concurrent_envs={needed}), which needs"
            " SUPPORTS_CONCURRENT_SESSIONS = True in its environment.\n"
            f"To play fewer episodes at once: --rl-env-config '{{\"sessions\": {max(1, allowed)}}}' (in each process)."
        )


def _code(answer: JsonObject) -> str:
    """The code of an answer that is an error; empty for any other."""
    return str(answer["data"].get("code") or "ERROR") if answer["type"] == "error" else ""
