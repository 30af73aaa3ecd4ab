"""What a secret is, and in which forms it is found."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.launch.preflight import check
from aitrain.redaction import MASK, is_secret_name, redact, redact_file, secret_values, without_secrets
from aitrain.ui import card

VALUE = 'se"cr\\et value\nwith ä'


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_api_key", VALUE)
    monkeypatch.setattr("aitrain.redaction._known.until", -1.0)


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
    assert MASK in redact(f"before {form} after")
    assert "cr" not in redact(f"before {form} after")
    log = tmp_path / "some.log"
    log.write_bytes(b"\xff " + form.encode() + b" after")
    redact_file(log)
    assert log.read_bytes().startswith(b"\xff ")
    assert b"cr" not in log.read_bytes()
    assert log.read_bytes().endswith(b"after")


def test_what_would_be_written_to_the_configuration_is_refused_by_the_name_of_the_variable() -> None:
    config = TrainConfig(model="tiny", rl_env="envs.arithmetic", rl_env_config={"login": {"password": VALUE}})
    with pytest.raises(ConfigError, match=r"rl_env_config: it holds the value of SOME_api_key") as refused:
        check(config)
    assert "cr" not in str(refused.value).replace("written", "").replace("environ", "")


@pytest.mark.parametrize("files", [["pytorch_model.bin"], ["pytorch_model-1.bin", "notes.txt"], []])
def test_weights_that_are_no_safetensors_are_refused_with_what_to_do(files: list[str], tmp_path: Path) -> None:
    for name in ("config.json", *files):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="only safetensors are loaded" if files else "no weights") as refused:
        check(TrainConfig(model=str(tmp_path), rl_env="envs.arithmetic"))
    assert not files or "save_pretrained" in str(refused.value)


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "apiKey", "db-password", "credential", "credentials", "Authorization", "AWS_SECRET_ACCESS_KEY", "pat",
     "passwd", "userPass", "DB_PASS", "cookie", "jwt", "x-auth", "privateKey", "client_secret", "dsn", "accessTokens",
     "sig", "X-Amz-Signature", "secretId"],
)  # fmt: skip
def test_names_of_secrets_are_known_however_they_are_written(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["tokenizer", "keyboard", "keywords", "author", "PWD", "compass", "pattern", "level", "passes", "pinned",
             "key_column", "password_policy", "tokenFile", "ssh_key_path", "key_names", "token_limit", "signal"]
)  # fmt: skip
def test_other_names_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


FORMED = "hf_" + "a" * 34
"""Put together, so that no tool takes this file for one that holds a token."""


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ({"credential": "x", "level": 3}, {"credential": MASK, "level": 3}),
        ({"a": [{"b": {"dbPassword": "x"}}]}, {"a": [{"b": {"dbPassword": MASK}}]}),
        ({"credentials": {"user": "me", "value": ["x"]}}, {"credentials": MASK}),
        ({"password": 1234, "max_tokens": 64, "use_auth": True, "token": None},
         {"password": MASK, "max_tokens": 64, "use_auth": True, "token": None}),
        ([{"name": "api_key", "value": "x"}, {"name": "city", "value": "Rome"}],
         [{"name": "api_key", "value": MASK}, {"name": "city", "value": "Rome"}]),
        ({"comment": f"me, {FORMED}"}, {"comment": f"me, {MASK}"}),
        ({"header": "Bearer " + "ab.cd" * 5}, {"header": MASK}),
        ({"db": "postgres://me:pw@host/x"}, {"db": f"postgres://{MASK}@host/x"}),
        ({"url": "https://h/?city=Rome&api_key=x#top"}, {"url": f"https://h/?city=Rome&api_key={MASK}#top"}),
        ({"aws": "AKIA" + "A1" * 8}, {"aws": MASK}),
        ({"db": "Password=x y;Server=db"}, {"db": f"Password={MASK} y;Server=db"}),
        ({"db": "host=db password=x sslmode=on"}, {"db": f"host=db password={MASK} sslmode=on"}),
        ({"url": "https://h/?sv=2020&sig=x"}, {"url": f"https://h/?sv=2020&sig={MASK}"}),
        (["Authorization: Basic x", "max_tokens=64"], [f"Authorization:{MASK}", "max_tokens=64"]),
        (["AIza" + "b" * 35, "sk_live_" + "c" * 24], [MASK, MASK]),
        ({"text": "a task-based skill, sk-1 and hf_x"}, {"text": "a task-based skill, sk-1 and hf_x"}),
    ],
    ids=range(16),
)  # fmt: skip
def test_a_secret_in_a_configuration_is_masked_at_any_depth(value: object, shown: object) -> None:
    assert without_secrets(value) == shown


@pytest.mark.parametrize("named", [{"rl_env": "envs.arithmetic"}, {}], ids=["command", "notebook"])
def test_the_model_card_which_is_uploaded_holds_no_secret_of_the_environment_or_of_trl(named: dict[str, str]) -> None:
    given = {"credential": "open sesame", "nested": [{"apiKey": "open sesame"}], "level": 7}
    config = TrainConfig(rl_env_config=given, trl={"hub_token": "open sesame"}, **named)
    facts = dict(card._facts(config, {}, {}))
    assert "level" in facts["its configuration"]
    assert "sesame" not in str(facts) + card._again(config, {})


def test_every_list_of_names_is_this_one() -> None:
    """What is uploaded, tracked, shown and logged agrees on what a secret is."""
    package = Path(__file__).parents[1] / "aitrain"
    files = [file for file in package.rglob("*.py") if file.name != "redaction.py"]
    naming = [file.name for file in files if "password" in file.read_text(encoding="utf-8").lower()]
    assert naming == []
