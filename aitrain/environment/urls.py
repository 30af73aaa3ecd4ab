"""URLs of servers that the user names."""

from __future__ import annotations

from urllib.parse import urlsplit

from aitrain.redaction import redact


def check_url(url: str, key_variable: str) -> str:
    """The URL without a slash at its end.

    Raises:
        ValueError: it is none, or holds credentials, which belong into an environment variable.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not a URL\nGive one such as http://127.0.0.1:8000.")
    if "@" in parts.netloc or redact(url) != url:
        raise ValueError(
            f"the URL of {parts.hostname} holds credentials\nPut the key into an environment variable: {key_variable}."
        )
    return url.rstrip("/")


def is_local(url: str) -> bool:
    """Whether a URL leads to this machine, so that no proxy is asked."""
    return urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")
