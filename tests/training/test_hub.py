"""Uploading, by the real client, to a small stand-in for the Hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = Path(__file__).parents[1] / "environments" / "vowels.py"
TOKEN = "not-a-real-token"


class Hub(BaseHTTPRequestHandler):
    """Answers what the client asks on the way to a commit, and remembers it."""

    requests: list[tuple[str, bytes]]
    refuses: bool

    def do_GET(self) -> None:
        self.answer({"name": "somebody", "type": "user", "id": "somebody/mine", "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.requests.append((self.path, body))
        if self.refuses:
            self.answer({"error": "the disk of the Hub is full"}, code=403)
        elif "preupload" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        else:
            address = f"http://127.0.0.1:{self.server.server_port}/somebody/mine"  # type: ignore[attr-defined]
            self.answer({"url": address, "name": "somebody/mine", "commitUrl": address, "commitOid": "1" * 40})

    def answer(self, value: Any, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.requests, Hub.refuses = [], False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def train_and_push(hub: ThreadingHTTPServer, model: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A step of training, with the upload at its end."""
    address = f"http://127.0.0.1:{hub.server_port}"
    environment = {
        **os.environ,
        "HF_ENDPOINT": address,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(folder),
    }
    flags = ["--max-steps=1", "--rl-max-new-tokens=4", "--eval-cases=1", "--project-name=mine", "--push-to-hub"]
    command = ["-m", "aitrain", "grpo", "--model", str(model), "--rl-env", f"{ENVIRONMENT}:Vowels", *flags]
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


def test_the_model_is_uploaded_to_a_private_repository(
    hub: ThreadingHTTPServer, small_model: Path, tmp_path: Path
) -> None:
    done = train_and_push(hub, small_model, tmp_path)

    assert done.returncode == 0, done.stderr
    assert "Uploaded to" in done.stderr
    sent = dict(Hub.requests)
    assert json.loads(sent["/api/repos/create"]) == {
        "name": "mine",
        "organization": "somebody",
        "visibility": "private",
    }
    lines = [json.loads(line) for line in sent["/api/models/somebody/mine/commit/main"].splitlines()]
    uploaded = {line["value"]["path"] for line in lines if line["key"] == "file"}
    assert uploaded >= {"model.safetensors", "config.json", "tokenizer.json", "README.md"}


def test_a_refused_upload_says_where_the_model_is_and_no_file_has_the_token(
    hub: ThreadingHTTPServer, small_model: Path, tmp_path: Path
) -> None:
    Hub.refuses = True
    done = train_and_push(hub, small_model, tmp_path)

    assert done.returncode == 1
    assert "upload to the Hub failed" in done.stderr
    assert "runs/mine/model" in done.stderr
    assert (tmp_path / "runs" / "mine" / "model" / "model.safetensors").exists()
    for file in (tmp_path / "runs").rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file
