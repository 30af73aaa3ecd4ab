"""What a secret is, and in which forms it is found."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest

from aitrain import ConfigError, TrainConfig
from aitrain.launch.preflight import check
from aitrain.privacy import MASK, mask_file, masked, secrets

VALUE = 'se"cr\\et value\nwith ä'


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_api_key", VALUE)
    monkeypatch.setattr("aitrain.privacy._known.until", -1.0)


def test_secrets_are_told_by_name_and_length_and_are_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "A_TOKEN": "1234567",
        "B_SECRET": "12345678",
        "KEYRING": str(Path.cwd()),
        "OTHER": "x" * 20,
    }.items():
        monkeypatch.setenv(name, value)
    found = secrets()
    assert {"B_SECRET", "SOME_api_key"} <= set(found)
    assert not {"A_TOKEN", "KEYRING", "OTHER"} & set(found)


@pytest.mark.parametrize(
    "form", [VALUE, json.dumps(VALUE), repr(VALUE), quote(VALUE), " ".join(VALUE.split())], ids=range(5)
)
def test_every_form_of_it_is_masked(form: str, tmp_path: Path) -> None:
    assert MASK in masked(f"before {form} after")
    assert "cr" not in masked(f"before {form} after")
    log = tmp_path / "some.log"
    log.write_bytes(b"\xff " + form.encode() + b" after")
    mask_file(log)
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
