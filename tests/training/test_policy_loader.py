"""Models that are loaded to be played: base and adapter, tokenizer, what ends a completion."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from aitrain.errors import ConfigError
from aitrain.options.train import TrainConfig
from aitrain.runs.model_reference import read_model
from aitrain.training import model
from aitrain.training.model import load_policy, load_tokenizer
from tests.conftest import write
from tests.training.conftest import save_adapter

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture
def adapter(small_model: Path, tmp_path: Path) -> Path:
    """An adapter that changes what the model says, with a tokenizer of its own."""
    adapted = save_adapter(small_model, tmp_path / "adapter")
    write(tmp_path, {"adapter/chat_template.jinja": "of the adapter"})
    torch.save(adapted(IDS).logits, tmp_path / "logits.pt")
    return tmp_path / "adapter"


def test_an_adapter_is_played_on_its_base_with_its_own_tokenizer(adapter: Path, small_model: Path) -> None:
    policy, base = (load_policy(read_model(str(folder)), TrainConfig()) for folder in (adapter, small_model))
    wanted = torch.load(adapter.parent / "logits.pt", weights_only=True)
    assert torch.equal(policy.model(IDS).logits, wanted)
    assert not torch.allclose(base.model(IDS).logits, wanted)
    assert policy.tokenizer.chat_template == "of the adapter"
    assert not policy.model.training


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """A Hub that takes connections and never answers; called at the end, it returns how many there were."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(model, "HUB_SECONDS", 0.1)
        server.setblocking(False)

        def connections() -> int:
            with suppress(BlockingIOError):
                server.accept()[0].close()
                return 1 + connections()
            return 0

        yield connections


def test_a_hub_that_never_answers_is_asked_once_and_own_runs_are_named_before(
    silent_hub: Callable[[], int], here: Path
) -> None:
    (here / "runs" / "sums").mkdir(parents=True)
    said: list[str] = []
    with pytest.raises(ConfigError, match="the Hub cannot be reached"):
        load_tokenizer(TrainConfig(model="nosuch"), say=said.append)
    assert "(runs: sums)" in said[0]
    assert silent_hub() == 1


def test_a_model_in_the_cache_is_loaded_though_the_hub_never_answers(
    silent_hub: Callable[[], int], small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = tmp_path / "models--some--model"
    shutil.copytree(small_model, cached / "snapshots" / "abc")
    write(cached, {"refs/main": "abc"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    policy = load_policy(read_model("some/model"), TrainConfig())
    assert policy.config.model == "some/model"
    assert silent_hub() == 1
    assert not constants.HF_HUB_OFFLINE


def test_a_damaged_adapter_is_named(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"cannot load the adapter .*adapter:"):
        load_policy(read_model(str(adapter)), TrainConfig())
