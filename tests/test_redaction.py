"""What a secret is, and in which forms it is found."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.events import Note, encode
from aitrain.launch.preflight import check, refuse_secrets
from aitrain.redaction import (
    MASK,
    RedactedLog,
    RedactedStream,
    is_secret_name,
    known_forms,
    redact,
    secret_values,
    source_without_secrets,
    to_jsonable,
    without_secrets,
)
from aitrain.runs.run_folder import append_lines
from aitrain.ui import card
from aitrain.ui.overview import Overview

VALUE = 'se"cr\\et value\nwith ä'


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_api_key", VALUE)
    known_forms.cache_clear()


def test_secrets_are_told_by_name_and_length_and_are_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "A_TOKEN": "1234567",
        "B_SECRET": "12345678",
        "KEYRING": str(Path.cwd()),
        "OTHER": "x" * 20,
    }.items():
        monkeypatch.setenv(name, value)
    found = secret_values()
    assert {"B_SECRET", "SOME_api_key"} <= set(found)
    assert not {"A_TOKEN", "KEYRING", "OTHER"} & set(found)


@pytest.mark.parametrize(
    "form", [VALUE, json.dumps(VALUE), repr(VALUE), quote(VALUE), " ".join(VALUE.split())], ids=range(5)
)
def test_every_form_of_it_is_masked(form: str, tmp_path: Path) -> None:
    hidden = redact(f"before {form} after")
    assert MASK in hidden
    assert "cr" not in hidden
    log = tmp_path / "some.log"
    with closing(RedactedLog(log, os.environ)) as pipe:
        subprocess.run(["cat"], input=b"\xff " + form.encode() + b" after", stdout=pipe.pipe, check=True)
    written = log.read_bytes()
    assert written.startswith(b"\xff ")
    assert b"cr" not in written
    assert written.endswith(b"after")


RANDOM = "q8Zt51mVw0aPLr73bXy2"
FORMS = {
    "json": ('{"api_key": "%s"}', RANDOM),
    "json in json": ('{"said": "{\\"api_key\\": \\"%s\\"}"}', RANDOM),
    "repr": ("{'said': '{\"client_secret\": \"%s\"}'}", RANDOM),
    "user and password": ("https://user:%s@host/x", "p@ss:word"),
    "token as user": ("git+https://%s@host/x", RANDOM),
    "parameter": ("https://host/x?a=1&api_key=%s&b=2", "short"),
    "first parameter": ("see (https://host/x?token=%s)", RANDOM),
    "yaml": ("api_key: %s # one", RANDOM),
    "yaml in a list": ("x:\n- client-secret:   %s\ny: 1", RANDOM),
    "ini": ("aws_secret_access_key = %s", "wJalrXUtnFEMI/K7MDENG/bPxRfiCY" + RANDOM),
    "braces": ("{api_key: %s, x: 1}", RANDOM),
    "header": ("curl -H 'X-Api-Key: %s'", RANDOM),
    "cookie": ("Cookie: a=1; session=%s", RANDOM),
    "argument": ("run --api-key %s", RANDOM),
    "arguments": ("Command '['run', '--api-key', '%s']' returned", RANDOM),
    "pairs": ("Headers([('x-api-key', '%s')])", RANDOM),
    "fragment": ("https://host/x#access_token=%s", RANDOM),
    "lines in json": ('{"said": "a\\napi_key: %s\\ntoken=b"}', RANDOM),
    "three quotes": ('api_key = """%s"""', RANDOM),
    "shell": ("export MY_API_KEY=%s", RANDOM),
    "github": ("ghp_%s", RANDOM),
    "openai": ("sk-proj-%s", "aB3_" + RANDOM),
    "older openai": ("sk-%s", "a" * 20),
    "aws": ("AKIA%s", "IOSFODNN7EXAMPLE"),
    "hugging face": ("hf_%s", "aBcDeFgH" * 4),
    "bearer": ("Authorization: Bearer %s", "ab.cd" * 5),
    "private key": ("-----BEGIN RSA PRIVATE KEY-----\n%s\nMII\n-----END RSA PRIVATE KEY-----", RANDOM),
}
"""Texts with a secret that aitrain has not been told of, put together, so that no tool takes this file for one."""
TEXTS = {name: f"before {text % secret} after" for name, (text, secret) in FORMS.items()}


def through_a_stream(text: str, tmp_path: Path) -> str:
    written = io.StringIO()
    RedactedStream(written).write(text)
    return written.getvalue()


def through_a_log(text: str, tmp_path: Path) -> str:
    """Written by two programs, in the middle of a line."""
    half = len(text) // 2
    with closing(RedactedLog(tmp_path / "log", os.environ)) as log:
        for part in (text[:half], text[half:]):
            subprocess.run(["printf", "%s", part], stdout=log.pipe, check=True)
    return (tmp_path / "log").read_text()


def through_a_record(text: str, tmp_path: Path) -> str:
    append_lines(tmp_path / "records", [{text: {"messages": [{"role": "user", "content": text}], "row": (text,)}}])
    return json.dumps(json.loads((tmp_path / "records").read_text()), ensure_ascii=False)


WAYS = {
    "text": lambda text, _: redact(text),
    "stream": through_a_stream,
    "log": through_a_log,
    "record": through_a_record,
    "event": lambda text, _: encode(Note(text)),
    "options": lambda text, _: str(without_secrets({"comment": [text]})),
    "source": lambda text, _: source_without_secrets(f"say = {text}"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_secret_is_masked_on_every_way_out(form: str, way: str, tmp_path: Path) -> None:
    out = WAYS[way](TEXTS[form], tmp_path)
    assert MASK in out
    assert FORMS[form][1] not in out
    assert "before" in out
    assert "after" in out


def test_a_named_secret_is_masked_in_a_record_and_what_a_task_is_about_is_not() -> None:
    row = {"api_key": RANDOM, "password": "elephant", "key": "C", "token": "Washington", "answer_key": "b) 12"}
    assert to_jsonable(row) == {**row, "api_key": MASK}
    plain = [
        'max(items, key=len), {"token": "Washington"}, password="elephant"',
        "hf_hub_download_with_cache, sk-estimators, task-based, the bearer instrument",
        "http://host:8000/a@b, x?y:z, say ?a=1&max_tokens=64",
        "Authorization: please ask the owner",
    ]
    assert [redact(text) for text in plain] == plain


CODE = [
    'api_key = os.environ["SOME_OTHER_KEY_2024"]',
    'token: Annotated[str, Field(min_length=8)] = Field(default="")',
    "token: Optional[List[TokenEncoder2]] = None",
    "api_key = self._client2.settings.api_key",
    "token=read_token_of_user_2(1)",
    "token = token_of_each_case_2[0]",
    "sorted(cases, key=str.casefold)",
    "api_key: ${OPENAI_API_KEY_2024}",
]
"""Lines of programs with the name of a secret, and without one."""


@pytest.mark.parametrize("line", CODE)
def test_an_expression_in_a_program_is_no_secret(line: str) -> None:
    assert redact(f"    {line}\n") == f"    {line}\n"
    assert source_without_secrets(f"    {line}\n") == f"    {line}\n"


def test_a_variable_is_no_secret_in_source_code_while_a_word_may_be_one() -> None:
    line = "sorted(x, key=score_of_answer), login(password=user_password)"
    assert source_without_secrets(line) == line
    assert source_without_secrets("'host=db password=open_sesame'") == f"'host=db password={MASK}'"


@pytest.mark.parametrize(
    "given",
    [{"x": ["a", {"y": TEXTS["hugging face"]}]}, {"x": {"db-password": "open sesame"}}, {"login": [VALUE]}],
)
def test_an_option_with_a_secret_is_refused_before_it_is_written(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="rl_env_config: it holds") as refused:
        check(TrainConfig(model="tiny", rl_env="envs.arithmetic", rl_env_config=given))
    assert not any(secret in str(refused.value) for secret in (FORMS["hugging face"][1], "sesame", VALUE[:5]))
    refuse_secrets(TrainConfig(rl_env_config={"api_key": "${MY_API_KEY}", "key": "answer_column"}))


def test_a_log_is_written_while_its_lines_come_and_survives_its_opener(tmp_path: Path) -> None:
    file = tmp_path / "log"
    log = RedactedLog(file, os.environ)
    log.pipe.write(b"one\ntwo")
    log.pipe.flush()
    while not file.exists() or file.read_bytes() != b"one\n":
        assert log._process.poll() is None
    os.kill(log._process.pid, signal.SIGINT)
    os.kill(log._process.pid, signal.SIGTERM)
    log.pipe.write(b" three")
    log.close()
    assert file.read_bytes() == b"one\ntwo three"


def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path) -> None:
    for name in ("config.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="could run any code"):
        check(TrainConfig(model=str(tmp_path), rl_env="envs.arithmetic"))


SECRET_NAMES = [
    "HF_TOKEN", "apiKey", "db-password", "credential", "credentials", "Authorization", "AWS_SECRET_ACCESS_KEY", "pat",
    "passwd", "userPass", "DB_PASS", "cookie", "jwt", "x-auth", "privateKey", "client_secret", "dsn", "accessTokens",
    "sig", "X-Amz-Signature", "secretId",
]  # fmt: skip
OTHER_NAMES = [
    "tokenizer", "keyboard", "keywords", "author", "PWD", "compass", "pattern", "level", "passes", "pinned",
    "key_column", "password_policy", "tokenFile", "ssh_key_path", "key_names", "token_limit", "signal",
]  # fmt: skip


def test_names_of_secrets_are_known_however_they_are_written_and_others_are_none() -> None:
    assert [name for name in (*SECRET_NAMES, *OTHER_NAMES) if is_secret_name(name)] == SECRET_NAMES


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"a": [{"b": {"dbPassword": "x"}}]}, {"a": [{"b": {"dbPassword": MASK}}]}),
        ({"credentials": {"user": "me", "value": ["x"]}}, {"credentials": MASK}),
        ({"password": 1234, "max_tokens": 64, "use_auth": True, "token": None},
         {"password": MASK, "max_tokens": 64, "use_auth": True, "token": None}),
        ([{"name": "api_key", "value": "x"}, {"name": "city", "value": "Rome"}],
         [{"name": "api_key", "value": MASK}, {"name": "city", "value": "Rome"}]),
        (["AIza" + "b" * 35, "sk_live_" + "c" * 24], [MASK, MASK]),
    ],
    ids=range(5),
)  # fmt: skip
def test_a_secret_in_a_configuration_is_masked_at_any_depth(value: object, shown: object) -> None:
    assert without_secrets(value) == shown


def test_the_model_card_which_is_uploaded_holds_no_secret_of_the_environment_or_of_trl() -> None:
    given = {"credential": "open sesame", "nested": [{"apiKey": "open sesame"}], "level": 7}
    config = TrainConfig(rl_env_config=given, trl={"hub_token": "open sesame"}, rl_env="envs.arithmetic")
    overview = Overview(Path("nowhere"))
    text = card.card_text(overview, Path("nowhere"), config)
    assert 'rl_env_config: {"credential": ' in text
    assert '"level": 7}' in text
    assert "sesame" not in text
