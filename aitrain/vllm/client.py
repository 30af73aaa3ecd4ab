"""HTTP calls of a vLLM server, each with a deadline."""

from __future__ import annotations

from typing import Any

import httpx

from aitrain.errors import ServerGoneError, ServerRefusedError, ServerTimeoutError

CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 5.0


class VLLMClient:
    """Calls that all have a deadline, each on a connection of its own: one that was kept may be closed by now."""

    def __init__(self, url: str, deadline: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._deadline = deadline
        self._http = httpx.Client(
            timeout=httpx.Timeout(deadline, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,  # a proxy for the world outside is none for a machine next door
        )

    def get(self, path: str) -> Any:
        """What is there.

        Raises:
            ServerGoneError, ServerRefusedError, ServerTimeoutError: as for `post`.
        """
        return self._call("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer.

        Raises:
            ServerGoneError: there is no server, it hung up, or says that it failed.
            ServerRefusedError: it does not do what it was asked for.
            ServerTimeoutError: it took too long.
        """
        return self._call("POST", path, json=body)

    def is_up(self) -> bool:
        """Whether it would take a request now."""
        try:
            return self._http.get(f"{self.url}/health", timeout=HEALTH_SECONDS).status_code == 200
        except httpx.HTTPError:
            return False

    def _call(self, verb: str, path: str, **body: Any) -> Any:
        try:
            response = self._http.request(verb, f"{self.url}{path}", **body)
        except httpx.ReadTimeout:
            raise ServerTimeoutError(
                f"The vLLM server at {self.url} did not answer {path} within {self._deadline:.0f} seconds.\n"
                "Its log says what it is doing; fewer episodes at a time or shorter answers take less."
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerGoneError(f"{path}: {type(error).__name__}: {error}") from None
        if response.status_code >= 400:
            raise self._failure(path, response)
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    def _failure(self, path: str, response: httpx.Response) -> Exception:
        what = f"{path}: {response.status_code}: {_message(response)}"
        if response.status_code >= 500:
            return ServerGoneError(what)
        return ServerRefusedError(f"The vLLM server at {self.url} refuses {what}", response.status_code)


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
        text = body["error"]["message"] if "error" in body else body["detail"]
    except (ValueError, KeyError, TypeError):
        text = response.text
    return " ".join(str(text).split())[:500]
