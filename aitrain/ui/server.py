"""The page server on 127.0.0.1: the page of report.html for any run, up to date and with all rollouts.

Requests need the server's key, as every user of the machine reaches the port: the address of the page has it, and a
cookie from then on. They are served only for the hosts 127.0.0.1 and localhost, also through a forwarded port (this
prevents DNS rebinding), and only from the page itself. They can get the page, its parts, and runs by their ids; nothing
is written, and no part of a request becomes a path.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from aitrain.errors import ConfigError, RequestRefusedError
from aitrain.runs.json_values import JsonObject
from aitrain.ui.episodes import Query
from aitrain.ui.page import SERVED_POLICY, SERVED_SCRIPTS, STYLES, asset, problem_page, served
from aitrain.ui.run_registry import OpenRun, RunRegistry

HOSTS = {"127.0.0.1", "localhost"}
HEADERS = {
    "Content-Security-Policy": SERVED_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
OWN_POLICY = "frame-ancestors 'none'"
"""For self-contained pages, which have a policy of their own with the hashes of their scripts."""
KINDS = {
    "page": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "html": "text/html",
    "json": "application/json",
}

MAX_WAITING = 128
"""Maximum connections without a request that has the key; beyond it, the oldest one is closed."""

Parameters = Mapping[str, str]


class PageServer(ThreadingHTTPServer):
    """Serves the runs of a registry on 127.0.0.1; port 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, registry: RunRegistry, port: int) -> None:
        self.registry, self.key = registry, secrets.token_urlsafe(24)
        self.waiting: dict[Any, None] = {}
        """Connections without a request that has the key, the oldest first."""
        super().__init__(("127.0.0.1", port), _Handler)
        self.cookie = f"aitrain-{self.server_port}"

    @property
    def address(self) -> str:
        """URL of the page, with the key."""
        return f"http://127.0.0.1:{self.server_port}/?key={self.key}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread."""
        self.waiting[request] = None
        if len(self.waiting) > MAX_WAITING:
            with suppress(OSError, StopIteration, RuntimeError):  # a thread has just ended one
                next(iter(self.waiting)).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.waiting.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Show an error of ours; a client that has gone away is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30
    server_version, sys_version = "aitrain", ""

    def do_GET(self) -> None:
        """Send the response, or an error as JSON."""
        try:
            self._check_origin()
            if not self._enter():
                kind, body = self._answer()
                self._send(HTTPStatus.OK, kind, body)
        except RequestRefusedError as refused:
            if self.path.partition("?")[0] in ("/", *PAGES):
                self._send(refused.status, "html", problem_page(str(refused)).encode())
            else:
                self._send(refused.status, "json", _as_json({"error": str(refused)}))
        except OSError:
            raise  # the page was left
        except Exception as error:
            self._send(
                HTTPStatus.INTERNAL_SERVER_ERROR, "json", _as_json({"error": str(error) or type(error).__name__})
            )

    def _refuse_method(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "json", _as_json({"error": "Only GET is allowed."}))

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = _refuse_method

    def _check_origin(self) -> None:
        hosts = self.headers.get_all("Host", [])
        try:
            is_ours = len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in HOSTS
        except ValueError:
            is_ours = False
        if not is_ours:
            raise RequestRefusedError(HTTPStatus.MISDIRECTED_REQUEST, "The host must be 127.0.0.1 or localhost.")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            raise RequestRefusedError(HTTPStatus.FORBIDDEN, "Requests from other pages are refused.")
        is_page = self.path.partition("?")[0] == "/"  # other pages may link to it, as it contains no data
        if not is_page and self.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            raise RequestRefusedError(HTTPStatus.FORBIDDEN, "Requests from other pages are refused.")

    def _enter(self) -> bool:
        """Check the key; returns whether it was in the address and the client was sent on, with a cookie.

        Raises:
            RequestRefusedError: it is missing or wrong.
        """
        path, _, query = self.path.partition("?")
        if path.startswith("/assets/"):  # of the page that says that the key is missing
            return False
        parameters = dict(_parameters(query)) if path in ("/", *PAGES) else {}
        given = parameters.pop("key", None)
        if not hmac.compare_digest((given or self._cookie()).encode(), self.server.key.encode()):
            raise RequestRefusedError(HTTPStatus.FORBIDDEN, "The key is missing: open the address of aitrain view.")
        self.server.waiting.pop(self.connection, None)
        if given is None:
            return False
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", f"{path}?{urlencode(parameters)}" if parameters else path)
        self.send_header("Set-Cookie", f"{self.server.cookie}={given}; Path=/; HttpOnly; SameSite=Lax")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def _cookie(self) -> str:
        sent = self.headers.get("Cookie", "").split(";")  # http.cookies refuses all if another program's is odd
        return dict(one.strip().partition("=")[::2] for one in sent).get(self.server.cookie, "")

    def _answer(self) -> tuple[str, bytes]:
        path, _, query = self.path.partition("?")
        if path == "/":
            return "html", served().encode()
        if path.removeprefix("/assets/") in (*STYLES, *SERVED_SCRIPTS) and path.startswith("/assets/"):
            return path.rpartition(".")[2], asset(path.removeprefix("/assets/")).encode()
        if path in PAGES:
            return "page", PAGES[path](self.server.registry, _parameters(query)).encode()
        if path in ANSWERS:
            return "json", _as_json(ANSWERS[path](self.server.registry, _parameters(query)))
        raise RequestRefusedError(HTTPStatus.NOT_FOUND, "There is nothing here.")

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **({"Content-Security-Policy": OWN_POLICY} if kind == "page" else {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{KINDS[kind]}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No-op: requests are not logged to the user's terminal."""


def _as_json(values: object) -> bytes:
    return json.dumps(values, allow_nan=False).encode()


# -- /api/


def _parameters(query: str) -> Parameters:
    try:
        return dict(parse_qsl(query, max_num_fields=30, errors="replace"))
    except ValueError:
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, "Too many parameters.") from None


def _run(registry: RunRegistry, parameters: Parameters) -> OpenRun:
    """The run with the id of a request, never by a path."""
    run = registry.runs().get(parameters.get("run", ""))
    if run is None:
        raise RequestRefusedError(HTTPStatus.NOT_FOUND, "There is no such run.")
    return run


def _comparison(registry: RunRegistry, parameters: Parameters) -> str:
    """The page that compares two runs case by case."""
    from aitrain.ui.comparison_page import comparison_page  # here, as the first page comes sooner without it

    a, b = (_run(registry, {"run": parameters.get(name, "")}).path for name in ("a", "b"))
    try:
        return comparison_page(a, b)
    except ConfigError as error:
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, str(error)) from None


def _sweep(registry: RunRegistry, parameters: Parameters) -> str:
    """The page of a sweep."""
    id = parameters.get("sweep", "")
    folder = registry.sweeps().get(id)
    if folder is None:
        raise RequestRefusedError(HTTPStatus.NOT_FOUND, "There is no such sweep.")
    try:
        from aitrain.ui.sweep_page import open_study, sweep_page  # here, because only this page needs Optuna

        return sweep_page(open_study(folder), folder, f"/?run={quote(f'{id}/', safe='')}{{}}")
    except ImportError:
        text = 'Optuna or Plotly is not installed.\nInstall them with: pip install "aitrain[sweep]"'
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, text) from None
    except ConfigError as error:
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, str(error)) from None


def _whole(parameters: Parameters, name: str) -> int | None:
    text = parameters.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, f"{name} must be a whole number.")
    return int(text)


def _share(parameters: Parameters, name: str) -> float | None:
    text = parameters.get(name, "")
    try:
        return float(text) if text else None
    except ValueError:
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, f"{name} must be a number.") from None


def _query(parameters: Parameters) -> Query:
    names = ("eval_phase", "case", "failure", "stop", "text", "order")
    texts = {name: parameters.get(name, "")[:1000] for name in names}
    low, high = _share(parameters, "low"), _share(parameters, "high")
    return Query(step=_whole(parameters, "step"), low=low, high=high, **texts)


def _episode(registry: RunRegistry, parameters: Parameters) -> JsonObject:
    number = _whole(parameters, "n")
    found = None if number is None else _run(registry, parameters).episode(number)
    if found is None:
        raise RequestRefusedError(HTTPStatus.NOT_FOUND, "There is no such episode.")
    return found


PAGES: dict[str, Callable[[RunRegistry, Parameters], str]] = {"/compare": _comparison, "/sweep": _sweep}
"""Self-contained pages."""
ANSWERS: dict[str, Callable[[RunRegistry, Parameters], object]] = {
    "/api/runs": lambda registry, _: registry.rows(),
    "/api/run": lambda registry, parameters: _run(registry, parameters).summary(),
    "/api/source": lambda registry, parameters: _run(registry, parameters).source(),
    "/api/cases": lambda registry, parameters: _run(registry, parameters).cases(),
    "/api/episodes": lambda registry, parameters: _run(registry, parameters).episodes(
        _query(parameters), _whole(parameters, "start") or 0
    ),
    "/api/episode": _episode,
}
