"""A small OpenEnv server for tests: its websocket protocol, with games instead of an environment."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

GUESS = {"properties": {"guess": {"type": "integer"}, "metadata": {"type": "object"}}, "required": ["guess"]}
CALL_TOOL = {
    "properties": {"tool_name": {"type": "string"}, "arguments": {"type": "object"}},
    "required": ["tool_name"],
}
JsonObject = dict[str, Any]


class Game:
    """One session: the number is seed % 10; a guess costs 0.1, the right one gives 1 and ends the game."""

    number = 0

    def reset(self, data: JsonObject) -> JsonObject:
        self.number = data["seed"] % 10
        return self.seen(f"A number from 0 to 9.{data.get('tone', '')}", None)

    def step(self, action: JsonObject) -> JsonObject:
        if action.get("type") == "list_tools":
            schema = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
            tools = [{"name": "guess", "description": "Guess the number.", "input_schema": schema}]
            return observed({"observation": {"tools": tools}, "reward": None, "done": False})
        guess = action["arguments"].get("number") if action.get("type") == "call_tool" else action.get("guess")
        if not isinstance(guess, int):
            errors = [{"loc": ["guess"], "msg": "Input should be a valid integer"}]
            return refused("VALIDATION_ERROR", "Invalid message", errors=errors)
        if guess == self.number:
            return self.seen("right", 1.0, done=True)
        return self.seen("higher" if guess < self.number else "lower", -0.1)

    def seen(self, text: str, reward: float | None, done: bool = False) -> JsonObject:
        said = {"observation": {"text": text}, "reward": reward, "done": done}
        return observed({**said, "metadata": {"luck": 0.5, "who": "me"}})


def observed(data: JsonObject) -> JsonObject:
    return {"type": "observation", "data": data}


def refused(code: str, message: str, **more: Any) -> JsonObject:
    return {"type": "error", "data": {"code": code, "message": message, **more}}


class OpenEnvServer:
    """The server, in threads of its own; `most` sessions at once are allowed."""

    def __init__(self, most: int = 64, action: JsonObject = GUESS) -> None:
        self.most, self.action = most, action
        self.highest = 0
        self.resets: list[JsonObject] = []
        self.open: set[ServerConnection] = set()
        self.url, self.lock = "", threading.Lock()

    @contextmanager
    def running(self) -> Iterator[OpenEnvServer]:
        with serve(self._session, "127.0.0.1", 0, process_request=self._http, close_timeout=1) as server:
            self.url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            yield self
        thread.join()

    def lose_connections(self) -> None:
        """Cut all connections, without a closing handshake."""
        for connection in tuple(self.open):
            connection.close_socket()

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/ws":
            return None
        status = HTTPStatus.OK if request.path == "/schema" else HTTPStatus.NOT_FOUND
        return connection.respond(status, json.dumps({"action": self.action}))

    def _session(self, connection: ServerConnection) -> None:
        with self.lock:
            is_full = len(self.open) >= self.most
            if not is_full:
                self.open.add(connection)
                self.highest = max(self.highest, len(self.open))
        if is_full:
            text = f"Server at capacity: {self.most}/{self.most} sessions"
            connection.send(json.dumps(refused("CAPACITY_REACHED", text)))
            return
        game = Game()
        try:
            for text in connection:
                connection.send(json.dumps(self._answer(game, json.loads(text))))
        except ConnectionClosed:
            pass
        finally:
            self.open.discard(connection)

    def _answer(self, game: Game, message: JsonObject) -> JsonObject:
        if message["type"] == "reset":
            self.resets.append(message["data"])
            return game.reset(message["data"])
        return game.step(message["data"])
