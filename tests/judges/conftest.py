"""A model server for tests of judges, and judges that ask it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from aitrain.environment.judges import asking, judge_http


@dataclass
class JudgeModel:
    """What the server answers, and what it was asked."""

    url: str = ""
    say: Callable[[dict[str, Any]], Any] = lambda body: '{"score": 10}'
    """The text of the reply to a request; a status as a number fails it, anything else is the whole answer."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@pytest.fixture(autouse=True)
def forget_judges() -> Iterator[None]:
    """Checks of environments ask which judges of this process were not asked."""
    yield
    asking.not_asked.clear()


def quoted_in(body: dict[str, Any], name: str = "answer") -> list[str]:
    """The quoted texts of a request, by the name of their tags."""
    data = body["messages"][1]["content"]
    return [found[2] for found in re.finditer(rf"<({name}[\w-]*)>\n(.*?)\n</\1>", data, re.DOTALL)]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeModel]:
    """A running server; pauses between retries are short."""
    monkeypatch.setattr(judge_http, "FIRST_PAUSE", 0.001)
    served = JudgeModel()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            served.asked.append(body)
            served.keys.append(self.headers.get("Authorization"))
            said = served.say(body)
            status, answer = (said, {"error": "busy"}) if isinstance(said, int) else (200, said)
            if isinstance(said, str):
                answer = {"choices": [{"message": {"content": said}}], "usage": {"total_tokens": 100}}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield served
    server.shutdown()
    server.server_close()
    thread.join()
