"""Small servers for tests of adapters by URL and of judges; each follows its protocol."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CHUNK = 16
"""Characters of one SSE event; real servers send 4096, here even small results take several."""


class Handler(BaseHTTPRequestHandler):
    owner: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def body(self) -> Any:
        length = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(length) or "null")

    def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(value).encode(), "application/json", status, headers)

    def send(self, data: bytes, kind: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def events(self, *events: tuple[str, str]) -> None:
        text = ": ping\r\n\r\n" + "".join(f"event: {name}\r\ndata: {data}\r\n\r\n" for name, data in events)
        self.send(text.encode(), "text/event-stream")


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class Server:
    """A server with what it was asked; its sessions are dicts by their id."""

    def __init__(self, handler: type[Handler]) -> None:
        self.sessions: dict[str, dict[str, Any]] = {}
        self.asked: list[str] = []

        self._http = _Http(("127.0.0.1", 0), type("Handler", (handler,), {"owner": self}))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[Server]:
        thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
            thread.join()


class OrsHandler(Handler):
    """Sums, as a server of the Open Reward Standard: `submit` is rewarded and finishes, `hint` is neither."""

    owner: Server
    TOOLS = (
        {"name": "submit", "description": "Say the sum.", "input_schema": {
            "type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"]}},
        {"name": "hint", "description": "Get a hint.", "input_schema": None},
    )  # fmt: skip

    @property
    def session(self) -> dict[str, Any]:
        return self.owner.sessions.setdefault(self.headers.get("X-Session-ID", ""), {})

    def do_GET(self) -> None:
        self.owner.asked.append(self.path)
        if self.path == "/list_environments":
            return self.answer(["sums"])
        if self.path == "/sums/prompt":
            if self.session.pop("starting", False):
                return self.answer({"detail": "Environment still starting."}, 503, {"Retry-After": "0.01"})
            text = f"What is {self.session['index']} + 1?"
            return self.answer([{"type": "text", "text": text}, {"type": "image", "data": ""}])
        if self.path == "/sums/tools":
            return self.answer({"tools": self.TOOLS, "terminal_tool": {"name": "submit", "arg": "value"}})
        return self.answer({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        self.owner.asked.append(self.path)
        body = self.body()
        if self.path == "/create_session":
            return self.events(("task_id", uuid.uuid4().hex), ("end", ""))
        if self.path == "/sums/num_tasks":
            return self.answer({"num_tasks": 12})
        if self.path == "/sums/call":
            return self.call(body["name"], body["input"])
        if self.path == "/create":
            self.session.update(index=body["index"], starting=True)
        if self.path == "/delete":
            self.owner.sessions.pop(self.headers["X-Session-ID"])
        return self.answer({})

    def call(self, name: str, given: dict[str, Any]) -> None:
        if name == "submit" and not str(given.get("value")).isdigit():
            return self.result({"ok": False, "error": "Tool input validation error: value"})
        text, output = "it is        a number", {"reward": None, "finished": False}
        if name == "submit":
            off_by = int(given["value"]) - self.session["index"] - 1
            if off_by == 99:
                return self.events(("task_id", "1"), ("error", "ZeroDivisionError: division by zero"))
            text = "wrong" if off_by else "right"
            output = {"reward": float(not off_by), "finished": True, "metadata": {"off_by": off_by, "who": "x"}}
        return self.result({"ok": True, "output": {"blocks": [{"type": "text", "text": text}], **output}})

    def result(self, value: dict[str, Any]) -> None:
        text = json.dumps(value)
        chunks = [text[start : start + CHUNK] for start in range(0, len(text), CHUNK)]
        self.events(("task_id", "1"), *(("chunk", chunk) for chunk in chunks[:-1]), ("end", chunks[-1]))


class NemoHandler(Handler):
    """A resources server of NeMo Gym: the tool `press` counts in the session, `verify` wants two presses."""

    owner: Server

    def do_POST(self) -> None:
        self.owner.asked.append(self.path)
        body = self.body()

        sid = (self.headers.get("Cookie") or "session=").partition("session=")[2].partition(";")[0]
        if self.path == "/seed_session":
            sid = uuid.uuid4().hex
            self.owner.sessions[sid] = {"presses": 0, "wanted": body.get("wanted", 2)}
            return self.answer({}, headers={"Set-Cookie": f"session={sid}; Path=/"})
        session = self.owner.sessions.get(sid)
        if session is None:
            return self.answer({"detail": "no session"}, 400)
        if self.path == "/press":
            if set(body) - {"times"}:
                return self.answer({"detail": "unknown argument"}, 422)
            session["presses"] += body.get("times", 1)
            return self.answer({"presses": session["presses"], "done": session["presses"] >= 3})
        if self.path == "/verify":
            self.owner.sessions[sid]["response"] = body["response"]
            reward = float(session["presses"] == session["wanted"])
            parts = {"presses": session["presses"], "politeness": 0.5}
            masked = bool(body.get("masked"))
            return self.answer({**body, "reward": reward, "reward_components": parts, "mask_sample": masked})
        return self.answer({"detail": "Not Found"}, 404)
