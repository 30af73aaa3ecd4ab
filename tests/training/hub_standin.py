"""A stand-in for the Hub on this machine: it answers the real client over HTTP, and keeps what was uploaded."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """What clients asked for, and the repositories: whether each is private, and its files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.requests: list[tuple[str, bytes]] = []
        self.refuses = False
        self.private: dict[str, bool] = {}
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class Answers(BaseHTTPRequestHandler):
    """The part of the Hub's API that an upload uses; weights go the way of large files, by Git LFS."""

    server: Hub

    def do_GET(self) -> None:
        self.server.requests.append((self.path, b""))
        name = self.path.removeprefix("/api/models/")
        if self.path == "/api/whoami-v2":
            self.answer({"name": "somebody", "type": "user"})
        elif name in self.server.private:
            self.answer({"id": name, "private": self.server.private[name], "siblings": []})
        elif "/revision/" in self.path or "/tree/" in self.path:
            self.answer([] if "/tree/" in self.path else {"id": "somebody/mine", "siblings": []})
        else:
            self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    def do_PUT(self) -> None:
        content = self.body()
        self.server.objects[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def do_POST(self) -> None:
        body = self.body()
        self.server.requests.append((self.path, body))
        if self.server.refuses:
            self.answer({"error": "the disk of the Hub is full"}, code=403)
        elif self.path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization', 'somebody')}/{given['name']}"
            self.server.private.setdefault(name, given.get("visibility") == "private")
            self.answer({"url": f"{self.server.address}/{name}", "name": name})
        elif "preupload" in self.path:
            modes = {True: "lfs", False: "regular"}
            files = [
                {"path": f["path"], "uploadMode": modes[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                for f in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            upload = {"upload": {"href": f"{self.server.address}/lfs"}}
            objects = [{**one, "actions": upload} for one in json.loads(body)["objects"]]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            self.commit(body)
        else:  # the front matter of the card is checked
            self.answer({"warnings": [], "errors": []})

    def commit(self, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.objects[value["oid"]]
        name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
        self.answer({"commitUrl": f"{self.server.address}/{name}/commit/1", "commitOid": "1" * 40})

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, value: Any, code: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""
