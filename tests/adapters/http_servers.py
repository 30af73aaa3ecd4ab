"""Small servers for tests of adapters by URL and of judges; each follows its protocol."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    owner: Any
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def body(self) -> Any:
        length = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(length) or "null")

    def answer(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


class Server:
    """A server; its sessions are dicts by their id."""

    def __init__(self, handler: type[Handler]) -> None:
        self.sessions: dict[str, dict[str, Any]] = {}
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


class NemoHandler(Handler):
    """A resources server of NeMo Gym: the tool `press` counts in the session, `verify` wants two presses."""

    owner: Server

    def do_POST(self) -> None:
        body = self.body()
        sid = (self.headers.get("Cookie") or "session=").partition("session=")[2].partition(";")[0]
        if self.path == "/seed_session":
            sid = uuid.uuid4().hex
            self.owner.sessions[sid] = {"presses": 0, "wanted": body.get("wanted", 2)}
            return self.answer({}, headers={"Set-Cookie": f"session={sid}; Path=/"})
        session = self.owner.sessions[sid]
        if self.path == "/press":
            if set(body) - {"times"}:
                return self.answer({"detail": "unknown argument"}, 422)
            session["presses"] += body.get("times", 1)
            return self.answer({"presses": session["presses"], "done": session["presses"] >= 3})
        if self.path == "/verify":
            session["response"] = body["response"]
            reward = float(session["presses"] == session["wanted"])
            parts = {"presses": session["presses"], "politeness": 0.5}
            masked = bool(body.get("masked"))
            return self.answer({**body, "reward": reward, "reward_components": parts, "mask_sample": masked})
        return self.answer({"detail": "Not Found"}, 404)
