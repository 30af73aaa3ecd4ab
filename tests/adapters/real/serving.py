"""Serves an ASGI application on a free port of 127.0.0.1, and writes the port into the file named in argv."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn


def serve(app: Any) -> None:
    """Serve until the process is ended."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)  # who connects before the application is up waits for it
    Path(sys.argv[1]).write_text(str(listener.getsockname()[1]))
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])
