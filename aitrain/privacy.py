"""What is kept from files, screens and strangers: the values of secrets, and telemetry."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

SECRET_NAME = re.compile(
    r"token(?!i[zs])|key(?!board|word)|secret|credential|bearer|cookie|passw|passphrase|passcode|"
    r"(?:^|_)(?:o?auth(?:orization|entication)?|pass|pwd|pin|pat|jwt|dsn|login|private|sig|signature)(?:_|$)"
)
"""Names of secrets, in lower case with underscores: of environment variables and of keywords of environments."""
ABOUT_SECRET = re.compile(r"_(?:columns?|fields?|names?|paths?|files?|dir|folder|policy|types?|length|limit|count)$")
"""Ends of names of what is known about a secret, or about a key of a table: `key_column`, `password_policy`."""
NO_SECRET = ("pwd", "oldpwd")
"""Names that only look like those of secrets: the shell's own."""
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
"""Values that are secrets by their form, whatever they are called."""
PARAMETER = re.compile(r"(?<![^?&;\s])([\w.-]+)=([^&;\s#]+)")
"""One of an address or of a connection string: `?api_key=...`, `Password=...;`, `host=db password=...`."""
ASSIGNED = re.compile(
    r"""(?x)
    (?<![\w-]) ([A-Za-z_][\w-]{0,80})
    ( ["']?\]? [ \t]{0,9} (?: : [\w.|\[\]\ ]{1,60} )? [:=] [ \t]{0,9} [rbfuRBFU]{0,2} )
    ( "[^"\n]*" | '[^'\n]*' )
    """
)
"""A text in quotes with a name before it, in source code: `api_key = "..."`, `{"password": "..."}`."""
SHORTEST = 8
"""Letters of a secret, at least: `false` and `1` are none, and would be found everywhere."""
MASK = "***"
FRESH = 1.0
"""Seconds for which the list is good; an environment may set variables while it runs."""

NO_TELEMETRY = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "WANDB_ERROR_REPORTING": "false",
}
"""What keeps the libraries from telling their makers how they are used, unless --telemetry is on."""


def opt_out(telemetry: bool) -> None:
    """Ask the libraries of this process and of those that it starts for silence; what the user has set stays."""
    if not telemetry:
        for name, value in NO_TELEMETRY.items():
            os.environ.setdefault(name, value)


def secrets() -> dict[str, str]:
    """The secrets among the environment variables, by name. A path that exists is none."""
    return {
        name: value
        for name, value in os.environ.items()
        if is_secret_name(name) and len(value) >= SHORTEST and not _is_path(value)
    }


def is_secret_name(name: str) -> bool:
    """Whether what has this name is a secret: `HF_TOKEN`, `apiKey`, `db-password`, `credentials`."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", "_", name).strip("_").lower()
    is_other = words in NO_SECRET or ABOUT_SECRET.search(words) is not None
    return not is_other and SECRET_NAME.search(words) is not None


def without_secrets(value: Any) -> Any:
    """A value as JSON has it, with *** for what is a secret by its name or its form, at any depth."""
    if isinstance(value, str):
        return masked(SECRET_VALUE.sub(MASK, PARAMETER.sub(_parameter, value)))
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
    return masked(SECRET_VALUE.sub(MASK, ASSIGNED.sub(_assigned, text)))


def _assigned(found: re.Match[str]) -> str:
    name, between, quoted = found.groups()
    names = re.findall(r"[\w-]+", f"{name} {between}")  # more than one in `key: str = "..."` and `else: key = "..."`
    is_secret = len(quoted) - 2 >= SHORTEST and any(map(is_secret_name, names))
    return f"{name}{between}{quoted[0]}{MASK}{quoted[0]}" if is_secret else found[0]


def _parameter(found: re.Match[str]) -> str:
    is_count = found[2].isdecimal() and len(found[2]) < SHORTEST  # max_tokens=64
    return f"{found[1]}={MASK}" if is_secret_name(found[1]) and not is_count else found[0]


def _hidden(name: str, value: Any) -> Any:
    """All of it, but for switches and null, and for counts such as `max_tokens: 64`."""
    is_count = isinstance(value, (int, float)) and re.search("token|key", name, re.IGNORECASE)
    return value if value is None or isinstance(value, bool) or is_count else MASK


def _is_path(value: str) -> bool:
    return value.startswith("/") and Path(value).exists()


def forms(values: Iterable[str]) -> list[str]:
    """How secrets may stand in a text: as they are, in JSON, in Python's repr, in an address; the longest first."""
    found = set()
    for value in values:
        found |= {value, repr(value)[1:-1], quote(value), quote(value, safe="")}
        found |= {json.dumps(value, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)}
        found.add(" ".join(value.split()))
    return sorted(found, key=len, reverse=True)


class _Known:
    """The forms of the secrets, looked up now and then."""

    forms: list[str]
    until = -1.0

    def fresh(self) -> list[str]:
        if time.monotonic() > self.until:
            self.forms = forms(secrets().values())
            self.until = time.monotonic() + FRESH
        return self.forms


_known = _Known()


def masked(text: str) -> str:
    """The text with *** where a secret stood."""
    for form in _known.fresh():
        if form in text:
            text = text.replace(form, MASK)
    return text


class MaskedStream:
    """A text stream that masks what is printed; everything else is the stream's own."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """All of it, for the caller's count."""
        self.stream.write(masked(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Each of them."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def mask_file(file: Path) -> None:
    """Mask what others printed into a log: a program that an environment ran, or the vLLM server."""
    found = [form.encode(errors="surrogateescape") for form in forms(secrets().values())]
    try:
        content = before = file.read_bytes()
        for form in found:
            content = content.replace(form, MASK.encode())
        if content != before:
            file.write_bytes(content)
    except OSError:
        return
