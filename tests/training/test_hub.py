"""Uploading, by the real client, to a small stand-in for the Hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.hub_standin import Hub, running_hub

ENVIRONMENT = Path(__file__).parents[1] / "environments" / "vowels.py"
TOKEN = "not-a-real-token"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as server:
        yield server


def train_and_push(hub: Hub, model: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """A step of training, with the upload at its end."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(folder),
    }
    flags = ["--max-steps=1", "--rl-max-new-tokens=4", "--eval-cases=1", "--project-name=mine", "--push-to-hub"]
    command = ["-m", "aitrain", "grpo", "--model", str(model), "--rl-env", f"{ENVIRONMENT}:Vowels", *flags]
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_model_is_uploaded_to_a_private_repository(hub: Hub, small_model: Path, tmp_path: Path) -> None:
    done = train_and_push(hub, small_model, tmp_path)

    assert done.returncode == 0, done.stderr
    assert "Uploaded to" in done.stderr
    sent = dict(hub.requests)
    assert json.loads(sent["/api/repos/create"]) == {
        "name": "mine",
        "organization": "somebody",
        "visibility": "private",
    }
    assert hub.files.keys() >= {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    trained = tmp_path / "runs" / "mine" / "model" / "model.safetensors"
    assert hub.files["model.safetensors"] == trained.read_bytes()


@pytest.mark.slow
def test_a_refused_upload_says_where_the_model_is_and_no_file_has_the_token(
    hub: Hub, small_model: Path, tmp_path: Path
) -> None:
    hub.refuses = True
    done = train_and_push(hub, small_model, tmp_path)

    assert done.returncode == 1
    assert "upload to the Hub failed" in done.stderr
    assert "runs/mine/model" in done.stderr
    assert (tmp_path / "runs" / "mine" / "model" / "model.safetensors").exists()
    for file in (tmp_path / "runs").rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes(), file
