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
import sys
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from pydantic import TypeAdapter, ValidationError

from aitrain.errors import ConfigError, RequestRefusedError
from aitrain.runs.environment_source import read_source
from aitrain.runs.json_values import JsonObject
from aitrain.runs.run_folder import RunFolder
from aitrain.ui.episodes import Query, cases_json, episode, find, page_of
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
OWN_POLICY = {"Content-Security-Policy": "frame-ancestors 'none'"}
"""For self-contained pages, which have a policy of their own with the hashes of their scripts."""
KINDS = {"css": "text/css", "js": "text/javascript", "html": "text/html", "json": "application/json"}
MOST_CASES = 10_000
Parameters = dict[str, str]


class PageServer(ThreadingHTTPServer):
    """Serves the runs of a registry on 127.0.0.1; port 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, registry: RunRegistry, port: int) -> None:
        self.registry, self.key = registry, secrets.token_urlsafe(24)
        super().__init__(("127.0.0.1", port), _Handler)
        self.cookie = f"aitrain-{self.server_port}"

    @property
    def address(self) -> str:
        """URL of the page, with the key."""
        return f"http://127.0.0.1:{self.server_port}/?key={self.key}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Show an error of ours; a client that has gone away is none."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30
    server_version, sys_version = "aitrain", ""

    def do_GET(self) -> None:
        """Send the response, or an error as JSON, or as a page where one was asked for."""
        self.where, _, query = self.path.partition("?")
        try:
            self._check_origin()
            parameters = _parameters(query)
            if not self._enter(parameters):
                self._answer(parameters)
        except RequestRefusedError as refused:
            if self.where in ("/", *PAGES):
                self._send(refused.status, "html", problem_page(str(refused)))
            else:
                self._send(refused.status, "json", {"error": str(refused)})
        except OSError:
            raise  # the page was left
        except Exception as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "json", {"error": str(error) or type(error).__name__})

    def _refuse_method(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "json", {"error": "Only GET is allowed."})

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = _refuse_method

    def _check_origin(self) -> None:
        hosts = self.headers.get_all("Host", [])
        try:
            is_ours = len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in HOSTS
        except ValueError:
            is_ours = False
        if not is_ours:
            raise RequestRefusedError(HTTPStatus.MISDIRECTED_REQUEST, "The host must be 127.0.0.1 or localhost.")
        is_foreign = self.headers.get("Origin", f"http://{hosts[0]}") != f"http://{hosts[0]}"
        if self.where != "/":  # to which other pages may link, as it contains no data
            is_foreign |= self.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none")
        if is_foreign:
            raise RequestRefusedError(HTTPStatus.FORBIDDEN, "Requests from other pages are refused.")

    def _enter(self, parameters: Parameters) -> bool:
        """Check the key; returns whether it was in the address and the client was sent on, with a cookie.

        Raises:
            RequestRefusedError: it is missing or wrong.
        """
        if self.where.startswith("/assets/"):  # of the page that says that the key is missing
            return False
        given = parameters.pop("key", None) if self.where in ("/", *PAGES) else None
        sent = self.headers.get("Cookie", "").split(";")  # http.cookies refuses all if another program's is odd
        cookie = dict(one.strip().partition("=")[::2] for one in sent).get(self.server.cookie, "")
        if not hmac.compare_digest((cookie if given is None else given).encode(), self.server.key.encode()):
            raise RequestRefusedError(HTTPStatus.FORBIDDEN, "The key is missing: open the address of aitrain view.")
        if given is None:
            return False
        target = f"{self.where}?{urlencode(parameters)}" if parameters else self.where
        cookie = f"{self.server.cookie}={given}; Path=/; HttpOnly; SameSite=Lax"
        self._send(HTTPStatus.SEE_OTHER, "html", "", {"Location": target, "Set-Cookie": cookie})
        return True

    def _answer(self, parameters: Parameters) -> None:
        folder, _, name = self.where[1:].partition("/")
        if self.where == "/":
            self._send(HTTPStatus.OK, "html", served())
        elif folder == "assets" and name in (*STYLES, *SERVED_SCRIPTS):
            self._send(HTTPStatus.OK, name.rpartition(".")[2], asset(name))
        elif self.where in PAGES:
            self._send(HTTPStatus.OK, "html", PAGES[self.where](self.server.registry, parameters), OWN_POLICY)
        elif folder == "api" and name in ANSWERS:
            self._send(HTTPStatus.OK, "json", ANSWERS[name](self.server.registry, parameters))
        else:
            raise RequestRefusedError(HTTPStatus.NOT_FOUND, "There is nothing here.")

    def _send(self, status: HTTPStatus, kind: str, content: object, headers: dict[str, str] | None = None) -> None:
        text = content if isinstance(content, str) else json.dumps(content, allow_nan=False)
        body = text.encode()
        self.send_response(status)
        type_and_size = {"Content-Type": f"{KINDS[kind]}; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**HEADERS, **type_and_size, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """No-op: requests are not logged to the user's terminal."""


def _parameters(query: str) -> Parameters:
    try:
        return dict(parse_qsl(query, max_num_fields=30, errors="replace"))
    except ValueError:
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, "Too many parameters.") from None


# -- pages


def _run(registry: RunRegistry, parameters: Parameters, name: str = "run") -> OpenRun:
    """The run with the id of a request, never by a path."""
    run = registry.look()[0].get(parameters.get(name, ""))
    if run is None:
        raise RequestRefusedError(HTTPStatus.NOT_FOUND, "There is no such run.")
    return run


def _comparison(registry: RunRegistry, parameters: Parameters) -> str:
    """The page that compares two runs case by case."""
    from aitrain.ui.comparison_view import comparison_page  # here, as the first page comes sooner without it

    a, b = (_run(registry, parameters, name).path for name in ("a", "b"))
    try:
        return comparison_page(a, b)
    except ConfigError as error:
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, str(error)) from None


def _sweep(registry: RunRegistry, parameters: Parameters) -> str:
    """The page of a sweep."""
    id = parameters.get("sweep", "")
    folder = registry.look()[1].get(id)
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


# -- /api/


def _number(parameters: Parameters, name: str) -> int:
    text = parameters.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, f"{name} must be a whole number.")
    return int(text)


def _episodes(registry: RunRegistry, parameters: Parameters) -> JsonObject:
    run = _run(registry, parameters)
    asked = {name: text for name, text in parameters.items() if name in Query.__dataclass_fields__}
    try:
        query = TypeAdapter(Query).validate_python(asked)
    except ValidationError as error:
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, error.errors()[0]["msg"]) from None
    numbers = _found(run, len(run.rollouts.entries), query)
    return page_of(run.rollouts, numbers, _number(parameters, "start"))


@lru_cache(maxsize=32)
def _found(run: OpenRun, count: int, query: Query) -> list[int]:
    """Episodes that match a query, cached for all pages of the result until there are more episodes."""
    return find(run.rollouts, query)


def _episode(registry: RunRegistry, parameters: Parameters) -> JsonObject:
    rollouts, number = _run(registry, parameters).rollouts, _number(parameters, "n")
    if number >= len(rollouts.entries):
        raise RequestRefusedError(HTTPStatus.NOT_FOUND, "There is no such episode.")
    return episode(rollouts, number)


PAGES: dict[str, Callable[[RunRegistry, Parameters], str]] = {"/compare": _comparison, "/sweep": _sweep}
"""Self-contained pages."""
ANSWERS: dict[str, Callable[[RunRegistry, Parameters], object]] = {
    "runs": lambda registry, _: registry.rows(),
    "run": lambda registry, parameters: {**_run(registry, parameters).overview(), "id": parameters["run"]},
    "source": lambda registry, parameters: read_source(RunFolder(_run(registry, parameters).path).environment_source),
    "cases": lambda registry, parameters: cases_json(_run(registry, parameters).rollouts, MOST_CASES),
    "episodes": _episodes,
    "episode": _episode,
}
