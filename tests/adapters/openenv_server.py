"""A small OpenEnv server for tests: its websocket protocol, with games instead of an environment."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

GUESS = {"properties": {"guess": {"type": "integer"}, "metadata": {"type": "object"}}, "required": ["guess"]}
CALL_TOOL = {
    "properties": {"tool_name": {"type": "string"}, "arguments": {"type": "object"}},
    "required": ["tool_name"],
}


class RefusedMessage(Exception):
    """A message that the server answers with an error; the arguments are its data."""


class Game:
    """One session: the number is seed % 10; a guess costs 0.1, the right one gives 1 and ends the game."""

    def __init__(self) -> None:
        self.number: int | None = None

    def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        self.number = data["seed"] % 10
        return self.seen(f"A number from 0 to 9.{data.get('tone', '')}", None)

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if action.get("type") == "list_tools":
            schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
            tools = [{"name": "guess", "description": "Guess the number.", "input_schema": schema}]
            return {"observation": {"tools": tools}, "reward": None, "done": False}
        if action.get("type") == "call_tool":
            action = {"guess": action["arguments"].get("number")}
        if not isinstance(action.get("guess"), int):
            errors = [{"loc": ["guess"], "msg": "Input should be a valid integer"}]
            raise RefusedMessage({"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors})
        if action["guess"] == self.number:
            return self.seen("right", 1.0, done=True)
        return self.seen("higher" if action["guess"] < (self.number or 0) else "lower", -0.1)

    def seen(self, text: str, reward: float | None, done: bool = False) -> dict[str, Any]:
        return {"observation": {"text": text}, "reward": reward, "done": done, "metadata": {"luck": 0.5, "who": "me"}}


class OpenEnvServer:
    """The server, in a thread of its own; `most` sessions at once are allowed."""

    def __init__(self, most: int = 64, action: dict[str, Any] = GUESS) -> None:
        self.most, self.action = most, action
        self.open = self.highest = 0
        self.resets: list[dict[str, Any]] = []
        self.connections: set[ServerConnection] = set()
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[OpenEnvServer]:
        loop, ready, stopped = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

        async def main() -> None:
            async with serve(self._session, "127.0.0.1", 0, process_request=self._http) as server:
                self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
                ready.set()
                await stopped.wait()

        self._loop = loop
        thread = threading.Thread(target=loop.run_until_complete, args=(main(),), daemon=True)
        thread.start()
        assert ready.wait(10)
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stopped.set)
            thread.join()

    def lose_connections(self) -> None:
        """Cut all connections, without a closing handshake."""
        for connection in tuple(self.connections):
            self._loop.call_soon_threadsafe(connection.transport.abort)

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        status = HTTPStatus.OK if request.path == "/schema" else HTTPStatus.NOT_FOUND
        headers = Headers({"Content-Type": "application/json"})
        return Response(status, status.phrase, headers, json.dumps({"action": self.action}).encode())

    async def _session(self, connection: ServerConnection) -> None:
        if self.open >= self.most:
            text = f"Server at capacity: {self.open}/{self.most} sessions"
            await connection.send(json.dumps(_error({"message": text, "code": "CAPACITY_REACHED"})))
            return
        self.connections.add(connection)
        self.open += 1
        self.highest = max(self.highest, self.open)
        try:
            game = Game()
            async for text in connection:
                await connection.send(json.dumps(self._answer(game, json.loads(text))))
        except ConnectionClosed:
            pass
        finally:
            self.connections.discard(connection)
            self.open -= 1

    def _answer(self, game: Game, message: dict[str, Any]) -> dict[str, Any]:
        try:
            if message["type"] == "state":
                return {"type": "state", "data": {}}
            if message["type"] == "reset":
                self.resets.append(message["data"])
                return {"type": "observation", "data": game.reset(message["data"])}
            return {"type": "observation", "data": game.step(message["data"])}
        except RefusedMessage as error:
            return _error(error.args[0])
        except RuntimeError as error:
            return _error({"message": str(error), "code": "EXECUTION_ERROR"})


def _error(data: dict[str, Any]) -> dict[str, Any]:
    return {"type": "error", "data": data}
