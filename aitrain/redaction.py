"""Redacts secrets in everything that is written or shown, and disables telemetry of libraries."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

SECRET_NAME = re.compile(
    r"token(?!i[zs])|key(?!board|word)|secret|credential|bearer|cookie|passw|passphrase|passcode|"
    r"(?:^|_)(?:o?auth(?:orization|entication)?|pass|pwd|pin|pat|jwt|dsn|login|private|sig|signature)(?:_|$)"
)
"""Matches names of secrets, in snake case: environment variables, and keywords of environments."""
NOT_THE_SECRET = re.compile(r"_(?:columns?|fields?|names?|paths?|files?|dir|folder|policy|types?|length|limit|count)$")
"""Ends of names that describe a secret or a table key but do not hold one: `key_column`, `password_policy`."""
HARMLESS_NAMES = ("pwd", "oldpwd")
"""Variables of the shell that match SECRET_NAME."""
SECRET_VALUE = re.compile(
    r"""(?x)
    \b(?: hf_ | sk- | [sr]k_(?:live|test)_ | gh[oprsu]_ | github_pat_ | glpat- | xox[abeprs]- | r8_ | nvapi- | gsk_
         | xai- | npm_ | pypi- | AIza | ya29\. )[\w-]{16,}
    | \b(?: AKIA | ASIA )[A-Z0-9]{16}\b
    | \beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*                # a JSON web token
    | (?i:\bbearer\s+)[\w.~+/-]{8,}=*
    | (?i:(?<=authorization:)\s*[a-z]+\s+\S+)
    | (?<=://)[^\s/@:]*:[^\s/@]+(?=@)                    # user and password in an address
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----[\s\S]*
    """
)
"""Matches values that have the form of a secret, such as known token prefixes."""
URL_PARAMETER = re.compile(r"(?<![^?&;\s])([\w.-]+)=([^&;\s#]+)")
"""A parameter of a URL or a connection string: `?api_key=...`, `Password=...;`, `host=db password=...`."""
ASSIGNED = re.compile(
    r"""(?x)
    (?<![\w-]) ([A-Za-z_][\w-]{0,80})
    ( ["']?\]? [ \t]{0,9} (?: : [\w.|\[\]\ ]{1,60} )? [:=] [ \t]{0,9} [rbfuRBFU]{0,2} )
    ( "[^"\n]*" | '[^'\n]*' )
    """
)
"""A text in quotes with a name before it, in source code: `api_key = "..."`, `{"password": "..."}`."""
MIN_SECRET_LENGTH = 8
"""Minimum characters of a secret: shorter values, such as `false`, occur in ordinary text."""
MASK = "***"
REFRESH_SECONDS = 1.0
"""Seconds between reads of the environment variables, which user code may set during a run."""

TELEMETRY_OFF = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "WANDB_ERROR_REPORTING": "false",
}
"""Environment variables that disable telemetry of libraries."""


def disable_telemetry(telemetry: bool) -> None:
    """Disable telemetry in this process and its children, unless `telemetry`; keeps what the user has set."""
    if not telemetry:
        for name, value in TELEMETRY_OFF.items():
            os.environ.setdefault(name, value)


def secret_values() -> dict[str, str]:
    """Environment variables that hold secrets, by name; existing paths do not count."""
    named = {name: value for name, value in os.environ.items() if is_secret_name(name)}
    long = {name: value for name, value in named.items() if len(value) >= MIN_SECRET_LENGTH}
    return {name: value for name, value in long.items() if not (value.startswith("/") and Path(value).exists())}


def is_secret_name(name: str) -> bool:
    """Whether a name is that of a secret, such as `HF_TOKEN`, `apiKey`, `db-password`, `credentials`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", "_", name).strip("_").lower()
    is_other = words in HARMLESS_NAMES or NOT_THE_SECRET.search(words) is not None
    return not is_other and SECRET_NAME.search(words) is not None


def without_secrets(value: Any) -> Any:
    """A JSON-like value with *** in place of secrets, detected by name or form at any depth."""
    if isinstance(value, str):
        return redact(SECRET_VALUE.sub(MASK, URL_PARAMETER.sub(_parameter, value)))
    if isinstance(value, Mapping):
        named = str(value.get("name", ""))  # {"name": "token", "value": ...}
        return {
            name: _hidden(secret, item) if is_secret_name(secret) else without_secrets(item)
            for name, item in value.items()
            for secret in [named if name == "value" and named else str(name)]
        }
    return [without_secrets(item) for item in value] if isinstance(value, (list, tuple)) else value


def source_without_secrets(text: str) -> str:
    """Source code with *** for what is a secret by its name or its form."""
    return redact(SECRET_VALUE.sub(MASK, ASSIGNED.sub(_assigned, text)))


def _assigned(found: re.Match[str]) -> str:
    name, between, quoted = found.groups()
    names = re.findall(r"[\w-]+", f"{name} {between}")  # more than one in `key: str = "..."` and `else: key = "..."`
    is_secret = len(quoted) - 2 >= MIN_SECRET_LENGTH and any(map(is_secret_name, names))
    return f"{name}{between}{quoted[0]}{MASK}{quoted[0]}" if is_secret else found[0]


def _parameter(found: re.Match[str]) -> str:
    is_count = found[2].isdecimal() and len(found[2]) < MIN_SECRET_LENGTH  # max_tokens=64
    return f"{found[1]}={MASK}" if is_secret_name(found[1]) and not is_count else found[0]


def _hidden(name: str, value: object) -> object:
    """MASK, unless the value is a boolean, None, or a count such as `max_tokens: 64`."""
    is_count = isinstance(value, (int, float)) and re.search("token|key", name, re.IGNORECASE)
    return value if value is None or isinstance(value, bool) or is_count else MASK


def encoded_forms(values: Iterable[str]) -> list[str]:
    """Encodings in which values may occur in a text: plain, JSON, repr, URL; longest first."""
    found = set()
    for value in values:
        found |= {value, repr(value)[1:-1], quote(value), quote(value, safe="")}
        found |= {json.dumps(value, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)}
        found.add(" ".join(value.split()))
    return sorted(found, key=len, reverse=True)


@dataclass
class _KnownForms:
    """Encoded forms of the current secrets."""

    forms: list[str] = field(default_factory=list)
    until: float = -1.0


_known = _KnownForms()


def redact(text: str) -> str:
    """The text with *** in place of secrets."""
    if time.monotonic() > _known.until:
        _known.forms = encoded_forms(secret_values().values())
        _known.until = time.monotonic() + REFRESH_SECONDS
    for form in _known.forms:
        if form in text:
            text = text.replace(form, MASK)
    return text


class RedactedStream:
    """Wraps a text stream and redacts what is written to it; delegates everything else."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write redacted text; returns the length of the original."""
        self.stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write redacted lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def redact_file(file: Path) -> None:
    """Redact a log to which other programs wrote directly, such as the vLLM server."""
    found = [form.encode(errors="surrogateescape") for form in encoded_forms(secret_values().values())]
    try:
        content = before = file.read_bytes()
        for form in found:
            content = content.replace(form, MASK.encode())
        if content != before:
            file.write_bytes(content)
    except OSError:
        return
