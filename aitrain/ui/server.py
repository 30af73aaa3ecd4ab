"""The page server on 127.0.0.1: the page of report.html for any run, up to date and with all rollouts.

Requests need the server's key, as every user of the machine reaches the port: the address of the page has it, and a
cookie from then on. They are served only for the hosts 127.0.0.1 and localhost, also through a forwarded port (this
prevents DNS rebinding), and only from the page itself. They can get the page, its parts, and runs by their ids; nothing
is written, and no part of a request becomes a path.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from aitrain.environment.http_server import RefusedRequestError, http_server
from aitrain.errors import ConfigError
from aitrain.runs.environment_source import read_source
from aitrain.runs.json_values import JsonObject
from aitrain.runs.run_folder import RunFolder
from aitrain.ui.comparison_view import comparison_page
from aitrain.ui.episodes import Query, cases_json, episode, find, page_of
from aitrain.ui.output import escape_controls
from aitrain.ui.page import served
from aitrain.ui.run_registry import OpenRun, RunRegistry

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
OF_PAGES = {"Content-Security-Policy": "frame-ancestors 'none'"}
"""Headers of a page, which has a policy with the hashes of its scripts."""
MOST_CASES = 10_000
Parameters = dict[str, str]


class PageServer:
    """Serves the runs of a registry on 127.0.0.1; port 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, registry: RunRegistry, port: int) -> None:
        self.registry, self.key = registry, secrets.token_urlsafe(24)
        self.listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.port = self.listener.getsockname()[1]
        self.cookie = f"aitrain-{self.port}"
        self.server = http_server(self._respond)

    @property
    def address(self) -> str:
        """URL of the page, with the key."""
        return f"http://127.0.0.1:{self.port}/?key={self.key}"

    def run(self) -> None:
        """Serve until Ctrl-C, which raises KeyboardInterrupt."""
        self.server.run([self.listener])

    async def _respond(self, request: Request) -> Response:
        """The response, or an error as plain text."""
        from starlette.concurrency import run_in_threadpool
        from starlette.responses import PlainTextResponse

        try:
            response = await run_in_threadpool(self._answer, request)
        except Exception as error:
            is_wrong = isinstance(error, (ConfigError, ValueError))  # such as pydantic's, of a query
            status = getattr(error, "status", 400 if is_wrong else 500)
            response = PlainTextResponse(escape_controls(str(error) or type(error).__name__), status)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    def _answer(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse, RedirectResponse

        path, parameters = request.scope["path"], {name: text for name, text in request.query_params.items() if text}
        _check_origin(request)
        given = parameters.pop("key", None) if path in PAGES else None
        key = request.cookies.get(self.cookie, "") if given is None else given
        if not hmac.compare_digest(key.encode(), self.key.encode()):
            raise RefusedRequestError(403, "The key is missing: open the address of aitrain view.")
        if given is not None:
            response = RedirectResponse(f"{path}?{urlencode(parameters)}" if parameters else path, 303)
            response.set_cookie(self.cookie, given, httponly=True, samesite="lax")
            return response
        if path == "/":
            return HTMLResponse(served(), headers=OF_PAGES)
        if path == "/compare":
            page = comparison_page(*(_run(self.registry, parameters, name).path for name in ("a", "b")))
            return HTMLResponse(page, headers=OF_PAGES)
        if path in ANSWERS:
            return _json(ANSWERS[path](self.registry, parameters))
        raise RefusedRequestError(404, "There is nothing here.")


def _check_origin(request: Request) -> None:
    """Refuse other methods than GET, hosts that only lead here, and other pages' requests."""
    hosts = request.headers.getlist("host")
    if request.method != "GET":
        raise RefusedRequestError(405, "Only GET is allowed.")
    if len(hosts) != 1 or not HOST.fullmatch(hosts[0]):
        raise RefusedRequestError(421, "The host must be 127.0.0.1 or localhost.")
    is_foreign = request.headers.get("origin", f"http://{hosts[0]}") != f"http://{hosts[0]}"
    if request.scope["path"] != "/":  # to which other pages may link, as it contains no data
        is_foreign |= request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
    if is_foreign:
        raise RefusedRequestError(403, "Requests from other pages are refused.")


def _json(content: object) -> Response:
    """JSON in ASCII, as texts of models may hold what UTF-8 cannot."""
    from starlette.responses import Response

    return Response(json.dumps(content, allow_nan=False), media_type="application/json")


# -- pages


def _run(registry: RunRegistry, parameters: Parameters, name: str = "run") -> OpenRun:
    """The run with the id of a request, never by a path."""
    run = registry.look().get(parameters.get(name, ""))
    if run is None:
        raise RefusedRequestError(404, "There is no such run.")
    return run


# -- /api/


def _episodes(registry: RunRegistry, parameters: Parameters) -> JsonObject:
    rollouts = _run(registry, parameters).rollouts
    fields: dict[str, Any] = {name: text for name, text in parameters.items() if name in Query.__dataclass_fields__}
    return page_of(rollouts, find(rollouts, Query(**fields)), int(parameters.get("start", 0)))


def _episode(registry: RunRegistry, parameters: Parameters) -> JsonObject:
    rollouts, number = _run(registry, parameters).rollouts, int(parameters.get("n", 0))
    if not 0 <= number < len(rollouts.entries):
        raise RefusedRequestError(404, "There is no such episode.")
    return episode(rollouts, number)


PAGES = ("/", "/compare")
ANSWERS: dict[str, Callable[[RunRegistry, Parameters], object]] = {
    "/api/runs": lambda registry, _: registry.rows(),
    "/api/run": lambda registry, asked: {**_run(registry, asked).overview(), "id": asked["run"]},
    "/api/source": lambda registry, asked: read_source(RunFolder(_run(registry, asked).path).environment_source),
    "/api/cases": lambda registry, asked: cases_json(_run(registry, asked).rollouts, MOST_CASES),
    "/api/episodes": _episodes,
    "/api/episode": _episode,
}
