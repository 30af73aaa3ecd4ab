"""Redacts secrets in everything that is written or shown, and disables telemetry of libraries."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

SECRET_NAME = re.compile(
    r"token(?!i[zs])|key(?!board|word)|secret|credential|bearer|cookie|passw|passphrase|passcode|"
    r"(?:^|_)(?:o?auth(?:orization|entication)?|pass|pwd|pin|pat|jwt|dsn|login|private|sig|signature)(?:_|$)"
)
"""Matches names of secrets, in snake case: environment variables, and keywords of environments."""
NOT_THE_SECRET = re.compile(
    r"_(?:columns?|fields?|names?|paths?|files?|dir|folder|policy|types?|length|limit|count)$|^(?:old)?pwd$"
)
"""Ends of names that describe a secret or a table key but do not hold one: `key_column`, `password_policy`; and the
shell's variables with the working directory."""
SURE_NAME = re.compile(r"api_?key|(?:access|private|client)_(?:key|secret|token)|passw|credential")
"""Matches names whose values are secrets in any case, while a `key` may be the answer to a task."""
SECRET_VALUE = re.compile(
    r"""(?x)
    \b(?: (?: hf_ | [sr]k_(?:live|test)_ | gh[oprsu]_ | r8_ | gsk_ | xai- | npm_ )[A-Za-z0-9]{16,}
         | (?: sk-(?:proj|ant|svcacct|admin|or|lf)- | github_pat_ | glpat- | xox[abeprs]- | nvapi- | pypi-AgE | AIza
             | ya29\. )[\w-]{16,}
         | sk-[A-Za-z0-9]{20,} )
    | \b(?: AKIA | ASIA )[A-Z0-9]{16}\b
    | \beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*                # a JSON web token
    | (?i:\bbearer\s+)(?=\S*(?:\d|\.\w))[\w.~+/-]{8,}=*
    | (?i:(?<=authorization:)\s*(?:basic|bearer|digest|negotiate|token)\s+\S+)
    | (?i:(?<=cookie:)\s*[\w.-]+=[^\s;"'\\]+(?:;\s*[\w.-]+=[^\s;"'\\]+)*)
    | (?<=://)(?:[^\s/@:]*:[^\s/]+|[^\s/@:]{16,})(?=@)     # user and password, or a token, in an address
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY-----(?s:.*?)(?:-----END[ ][A-Z ]*PRIVATE[ ]KEY-----|\Z)
    """
)
"""Matches values that have the form of a secret, such as known token prefixes."""
MADE_AT_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.~-]{16,}")
"""Matches a text that nobody thought of."""
VARIABLE_NAME = re.compile(r"\$?\{?[A-Z][A-Z0-9_]*\}?")
"""Matches the name of an environment variable, in place of its value."""
PARAMETER = re.compile(r"""(^|[?&#;\s])([\w.-]+)=([^&;\s#"'<>]+)""")
"""A parameter of a URL or a connection string: `?api_key=...`, `Password=...;`, `host=db password=...`."""
EXPRESSION = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+[^\w]*|[A-Za-z_][\w.]*\(.*")
"""Matches source code in place of a value: `key=texts.count)`, `token=read_token()`."""
ASSIGNED = re.compile(
    r"""(?x)
    (?<![\w-]) ([A-Za-z_][\w-]{0,80})
    ( (?:\\{0,4}["'])?\]? [ \t]{0,9} (?: : [\w.|\[\]\ ]{1,60} )? [:=] [ \t]{0,9} [rbfuRBFU]{0,2} )
    (\\{0,4}(?:\"{3}|'{3}|["']))
    ([^\n]{0,4000}?) \3
    """
)
"""A text in quotes with a name before it, in source code and in JSON: `api_key = "..."`, `{"password": "..."}`."""
BARE = re.compile(
    r"""(?x)
    (?<![\w-]) ((-{1,2})?[A-Za-z_][\w-]{0,80})
    ( [ \t]{0,9} [:=] [ \t]{0,9} | (?:\\{0,4}["'])? [ \t]{0,9} , [ \t]{0,9} (?:\\{0,4}["'])? | (?(2)[ \t]{1,9}|(?!)) )
    ([\w+/=.~-]{16,}+) (?![(\[])
    """
)
"""A text without quotes with a name before it: `api_key: ...` in YAML, `--api-key ...`, `('api_key', '...')`."""
WORDS = re.compile(r"(?:[A-Za-z]+\d{0,2}[._]+)*[A-Za-z]+\d{0,2}_*")
"""Matches a name in source code, even one with digits: `token = self.client2.token`."""
MIN_SECRET_LENGTH = 8
"""Minimum characters of a secret: shorter values, such as `false`, occur in ordinary text."""
MASK = "***"
LONGEST_REPEATED = 500
"""Characters of a text up to which its redacted form is remembered."""
REFRESH_SECONDS = 1.0
"""Seconds between reads of the environment variables, which user code may set during a run."""
DRAIN_SECONDS = 5.0
"""Seconds for the last lines of a log to be written."""
MOST_WAITING = 1 << 20
"""Bytes of a line, or of a private key, that are kept until their end has come."""
MOST_LOG, KEPT_LOG = 64 << 20, 8 << 20
"""Bytes at which a log is cut, and of its beginning and its end that are kept."""
CUT = b"[aitrain left out the middle of this log: more was printed than is kept]\n"

TELEMETRY_OFF = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "WANDB_ERROR_REPORTING": "false",
}
"""Environment variables that disable telemetry of libraries."""


def disable_telemetry() -> None:
    """Disable telemetry in this process and its children; keeps what the user has set."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)


def secret_values() -> dict[str, str]:
    """Environment variables that hold secrets, by name; existing paths do not count."""
    return {
        name: value
        for name, value in os.environ.items()
        if is_secret_name(name)
        and len(value) >= MIN_SECRET_LENGTH
        and not (value.startswith("/") and Path(value).exists())
    }


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a name is that of a secret, such as `HF_TOKEN`, `apiKey`, `db-password`, `credentials`."""
    words = _snake_case(name)
    return SECRET_NAME.search(words) is not None and NOT_THE_SECRET.search(words) is None


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+", "_", name).strip("_").lower()


def is_random(name: str, value: str) -> bool:
    """Whether a value with the name of a secret is one in a text of any kind, such as the answer of a model."""
    return MADE_AT_RANDOM.fullmatch(value) is not None and is_secret_name(name)


def redact(text: str, least: int | None = None) -> str:
    """The text with *** in place of secrets: values of environment variables, forms of secrets, and values with names.

    All that is written or shown goes through it. `least`: characters from which on a value with the name of a secret is
    one; None, for texts of any kind, such as the answer of a model: if it is made at random.
    """
    hide = _redacted_repeated if len(text) <= LONGEST_REPEATED else _redacted
    return hide(text, known_forms(time.monotonic() // REFRESH_SECONDS), least)


@lru_cache(maxsize=1)
def known_forms(moment: float) -> tuple[str, ...]:
    """The forms in which the secrets of the environment variables at a moment may occur in a text: plain, line by line,
    JSON, repr, URL; longest first."""
    found = set[str]()
    for value in secret_values().values():
        found |= {value, repr(value)[1:-1], quote(value), quote(value, safe="")}
        found |= {json.dumps(value, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)}
        found |= {" ".join(value.split()), *(line for line in value.splitlines() if len(line) >= MIN_SECRET_LENGTH)}
    return tuple(sorted(found, key=len, reverse=True))


def _redacted(text: str, forms: tuple[str, ...], least: int | None) -> str:
    def is_secret(name: str, value: str) -> bool:
        return is_random(name, value) if least is None else len(value) >= least and is_secret_name(name)

    def parameter(found: re.Match[str]) -> str:
        before, name, value = found.groups()
        is_count = value.isdecimal() and len(value) < MIN_SECRET_LENGTH  # max_tokens=64
        is_name = WORDS.fullmatch(value.rstrip(",)]}:")) is not None
        is_code = EXPRESSION.fullmatch(value) is not None and (is_name or not is_random(name, value))
        if least and is_name and "_" in value:  # key=score_of_answer, password=user_password
            is_code |= is_secret_name(value) or not SURE_NAME.search(_snake_case(name))
        is_one = is_secret_name(name) if before in ("?", "&") else is_secret(name, value) and not is_code
        return f"{before}{name}={MASK}" if is_one and not is_count else found[0]

    def assigned(found: re.Match[str]) -> str:
        name, between, quote, value = found.groups()
        names = re.findall(r"[\w-]+", f"{name} {between}")  # more than one in `key: str = "..."`, `else: key = "..."`
        is_one = any(is_secret(one, value) for one in names)
        return f"{name}{between}{quote}{MASK if is_one else ASSIGNED.sub(assigned, value)}{quote}"

    def bare(found: re.Match[str]) -> str:
        name, _, between, value = found.groups()
        is_one = is_random(name, value) and WORDS.fullmatch(value) is None
        return f"{name}{between}{MASK}" if is_one else found[0]

    for form in forms:
        if form in text:
            text = text.replace(form, MASK)
    return SECRET_VALUE.sub(MASK, BARE.sub(bare, PARAMETER.sub(parameter, ASSIGNED.sub(assigned, text))))


_redacted_repeated = lru_cache(maxsize=4096)(_redacted)
"""Names of fields and prompts are written again and again, as are the same answers."""


def source_without_secrets(text: str) -> str:
    """Source code with *** for what is a secret by its name or its form."""
    return redact(text, MIN_SECRET_LENGTH)


def without_secrets(value: Any) -> Any:
    """A JSON-like value with *** in place of secrets, detected by name or form at any depth."""
    if isinstance(value, str):
        return redact(value, 0)
    if isinstance(value, Mapping):
        named = str(value.get("name", ""))  # {"name": "token", "value": ...}
        return {
            name: _hidden(secret, item) if is_secret_name(secret) else without_secrets(item)
            for name, item in value.items()
            for secret in [named if name == "value" and named else str(name)]
        }
    return [without_secrets(item) for item in value] if isinstance(value, (list, tuple)) else value


def has_secret(value: object, name: str = "") -> bool:
    """Whether a value with this name is a secret, or holds one; the name of an environment variable is none."""
    if isinstance(value, Mapping):
        return any(has_secret(item, str(key)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return any(has_secret(item, name) for item in value)
    if not isinstance(value, str) or (VARIABLE_NAME.fullmatch(value) and not SECRET_VALUE.search(value)):
        return False
    is_sure = len(value) >= MIN_SECRET_LENGTH and SURE_NAME.search(_snake_case(name)) is not None
    return is_sure or is_random(name, value) or redact(value) != value


def _hidden(name: str, value: object) -> object:
    """MASK, unless the value is a boolean, None, or a count such as `max_tokens: 64`."""
    is_count = isinstance(value, (int, float)) and re.search("token|key", name, re.IGNORECASE)
    return value if value is None or isinstance(value, bool) or is_count else MASK


# -- values for JSON


def to_jsonable(value: object, redacts: bool = True) -> Any:
    """The value in JSON types, secrets redacted: nan and inf become null, scalars numbers, other objects their text,
    which is the same in each process: it has no address in memory."""
    match value:
        case str():
            return redact(value) if redacts else value
        case None | int():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {
                redact(str(key)) if redacts else str(key): MASK
                if redacts and isinstance(item, str) and is_random(str(key), item)
                else to_jsonable(item, redacts)
                for key, item in value.items()
            }
        case set() | frozenset():  # in an order that is the same in each process
            return sorted((to_jsonable(item, redacts) for item in value), key=str)
        case list() | tuple():
            return [to_jsonable(item, redacts) for item in value]
    item = getattr(value, "item", None)  # numpy and torch scalars have it
    if callable(item) and getattr(value, "ndim", 1) == 0:
        return to_jsonable(item(), redacts)
    return to_jsonable(re.sub(" at 0x[0-9a-f]+", "", str(value)), redacts)


# -- streams and logs


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


class RedactedLog:
    """A log that other processes write to, through a pipe to a process that masks secrets line by line.

    That process outlives this one, so that what is killed leaves no secret, and masks what programs write directly.
    """

    def __init__(self, file: Path, variables: Mapping[str, str]) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(file)]
        # without the terminal's end of a pipe, whose reader would wait for what outlives this process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=variables,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self.pipe = self._process.stdin
        """The end for writing."""

    def close(self) -> None:
        """Wait until all is written, for a short time if a process that is left still has the pipe."""
        if self.pipe.closed:
            return
        self.pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(DRAIN_SECONDS)


def write_log(path: str) -> None:
    """Append what comes through standard input to a file, without secrets."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # it ends when all who write have ended
        signal.signal(number, signal.SIG_IGN)
    waiting = b""
    with open(path, "ab", buffering=0) as file:
        while piece := os.read(0, 1 << 16):
            waiting += piece
            lines, end, rest = waiting.rpartition(b"\n")
            is_in_key = waiting.rfind(b"-----BEGIN") > waiting.rfind(b"-----END")
            if len(waiting) > MOST_WAITING:
                _append(file, waiting)
                waiting = b""
            elif end and not is_in_key:
                _append(file, lines + end)
                waiting = rest
        _append(file, waiting)


def cut(log: str) -> None:
    """Cut a log in place if it is too large: its beginning and its end are kept."""
    with suppress(OSError), open(log, "r+b") as file:
        if file.seek(0, os.SEEK_END) <= MOST_LOG:
            return
        file.seek(-KEPT_LOG, os.SEEK_END)
        end = file.read()
        file.seek(0)
        file.seek(file.read(KEPT_LOG).rfind(b"\n") + 1 or KEPT_LOG)
        file.write(CUT + end[end.find(b"\n") + 1 :])
        file.truncate()


def _append(file: FileIO, lines: bytes) -> None:
    with suppress(OSError):  # the disk is full: those who write must not wait
        file.write(redact(lines.decode(errors="surrogateescape")).encode(errors="surrogateescape"))
        cut(str(file.name))


if __name__ == "__main__":
    write_log(sys.argv[1])
