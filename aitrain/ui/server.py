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
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from aitrain.environment.http_server import RefusedRequestError, http_server
from aitrain.errors import ConfigError
from aitrain.runs.comparison import compare_all
from aitrain.runs.environment_source import read_source
from aitrain.runs.recorded_scoring import read_scorings
from aitrain.runs.rollout_index import RolloutIndex
from aitrain.runs.run_folder import RunFolder
from aitrain.ui.comparison_view import page_of_comparisons
from aitrain.ui.episodes import Query, cases_json, episode, find, page_of
from aitrain.ui.output import escape_controls
from aitrain.ui.overview import Overview
from aitrain.ui.page import run_page
from aitrain.ui.run_registry import run_rows, runs_of

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
PATIENCE = 0.3
"""Seconds that a page waits for new rollouts to be read before it is shown without them."""


class PageServer:
    """Serves the runs of some places on 127.0.0.1; port 0 takes a free one.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, places: Sequence[Path], port: int) -> None:
        self.places, self.key = places, secrets.token_urlsafe(24)
        self.listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.port = self.listener.getsockname()[1]
        self.cookie = f"aitrain-{self.port}"
        self._opened = dict[Path, RolloutIndex]()
        """The rollouts of the runs that were shown."""
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
        from starlette.responses import RedirectResponse, Response

        path, parameters = request.scope["path"], {name: text for name, text in request.query_params.items() if text}
        _check_origin(request)
        given = parameters.pop("key", "") if path == "/" else ""
        if not hmac.compare_digest((given or request.cookies.get(self.cookie, "")).encode(), self.key.encode()):
            raise RefusedRequestError(403, "The key is missing: open the address of aitrain view.")
        if given:
            response = RedirectResponse(f"/?{urlencode(parameters)}".rstrip("?"), 303)
            response.set_cookie(self.cookie, given, httponly=True, samesite="lax")
            return response
        content = self._content(path, parameters)
        if isinstance(content, str):
            return Response(content, media_type="text/html", headers=OF_PAGES)
        # in ASCII, as texts of models may hold what UTF-8 cannot
        return Response(json.dumps(content, allow_nan=False), media_type="application/json")

    def _content(self, path: str, parameters: Mapping[str, Any]) -> object:
        """A page as text, or the values that a page asks for."""
        if path == "/":
            return run_page()
        if path == "/compare":
            both = [self._run(parameters, name) for name in ("a", "b")]
            return page_of_comparisons(compare_all(read_scorings(both)))
        if path == "/api/runs":
            return run_rows(self.places)
        run = self._run(parameters, "run")
        rollouts = self._opened.setdefault(run, RolloutIndex(run / "rollouts"))
        match path:
            case "/api/run":
                is_ready = read_within(PATIENCE, rollouts)
                overview = Overview(run, rollouts if is_ready else None)
                return {**overview.to_json(), "is_ready": is_ready, "id": parameters["run"]}
            case "/api/source":
                return read_source(RunFolder(run).environment_source)
            case "/api/cases":
                return cases_json(rollouts, MOST_CASES)
            case "/api/episodes":
                return page_of(rollouts, find(rollouts, Query(**parameters)), int(parameters.get("start", 0)))
            case "/api/episode" if 0 <= (number := int(parameters.get("n", 0))) < len(rollouts.entries):
                return episode(rollouts, rollouts.entries[number])
        raise RefusedRequestError(404, "There is nothing here.")

    def _run(self, parameters: Mapping[str, str], name: str) -> Path:
        """The run with the id of a request, never by a path."""
        run = runs_of(self.places).get(parameters.get(name, ""))
        if run is None:
            raise RefusedRequestError(404, "There is no such run.")
        return run


def read_within(seconds: float, rollouts: RolloutIndex) -> bool:
    """Read new rollouts in a thread, and wait at most these seconds for it; returns whether it has read all."""

    def read() -> None:
        with suppress(OSError):  # the run is being removed or replaced: the next request reads it again
            rollouts.refresh()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(seconds)
    return not reader.is_alive()


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
