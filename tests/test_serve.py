"""`aitrain serve` with a stand-in for vLLM: its command, how it starts, and how it ends."""

from __future__ import annotations

import json
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from aitrain.cli.models import serve
from aitrain.vllm.server_process import GUARD
from tests.conftest import free_port, run_in_process, write

Make = Callable[..., Path]
LORA = {"peft_type": "LORA", "r": 24, "base_model_name_or_path": "org/base"}


@pytest.fixture
def run(here: Path) -> Make:
    """`run(LORA)`: a run folder with an adapter of this configuration; None for a whole model."""

    def make(adapter: dict[str, object] | None, options: str = "model: org/base") -> Path:
        config = {"model/config.json": "{}"} if adapter is None else {"model/adapter_config.json": json.dumps(adapter)}
        files = {"config.yaml": options, "status.json": "{}", "model/model.safetensors": "", **config}
        write(here / "runs" / "mine", {**files, "model/chat_template.jinja": "{{ messages }}"})
        return here / "runs" / "mine"

    return make


@pytest.fixture(autouse=True)
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def command(model: Path | str) -> list[str]:
    """The words that `--print` prints."""
    code, out, err = run_in_process(f"serve {model} --print --port 8000")
    assert code == 0, err
    return shlex.split(out)


def test_an_adapter_is_served_beside_its_base_each_by_its_name(run: Make) -> None:
    model = run(LORA, "model: org/base\nmodel_max_length: 512") / "model"
    words = command("mine")
    assert {"--model=org/base", "--served-model-name", "mine-base", "--host=127.0.0.1"} <= set(words)
    assert {"--max-model-len=512", "--enable-lora", "--max-lora-rank=32", "--dtype=float32"} <= set(words)
    assert words[words.index("--lora-modules") + 1] == f"mine={model}"
    assert f"--chat-template={model / 'chat_template.jinja'}" in words
    assert "VLLM_CPU_KVCACHE_SPACE=1" in words
    code, out, _ = run_in_process("serve mine --print --port 8000 --json")
    assert (code, shlex.split(json.loads(out)["command"])) == (0, words)


def test_a_whole_model_has_the_name_of_its_run_the_context_that_fits_and_its_thinking(run: Make) -> None:
    words = command(run(None, "model: org/base\nthinking: 'off'"))
    assert {"--served-model-name", "mine", "--max-model-len=auto"} <= set(words)
    assert not [word for word in words if "lora" in word or "--chat-template" in word]
    assert '--default-chat-template-kwargs={"enable_thinking": false, "thinking": false}' in words
    assert '--default-chat-template-kwargs={"enable_thinking": true, "thinking": true}' in command("mine --thinking on")


@pytest.mark.parametrize("odd", [{"bias": "all"}, {"alpha_pattern": {"q_proj": 64}}])
def test_an_adapter_that_vllm_cannot_load_or_would_scale_is_refused(run: Make, odd: dict[str, object]) -> None:
    run({**LORA, "bias": "none", "rank_pattern": {}, **odd})
    code, _, err = run_in_process("serve mine --print")
    assert (code, next(iter(odd)) in err) == (2, True)


class BecomesVLLMError(Exception):
    """Raised where the command becomes vLLM."""


def test_without_a_key_of_the_users_it_makes_one_and_shows_it_and_becomes_vllm(
    run: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    become = MagicMock(side_effect=BecomesVLLMError)
    monkeypatch.setattr("os.execve", become)
    monkeypatch.setattr("aitrain.packages.installed", MagicMock())
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    run(LORA)
    port = free_port()
    with pytest.raises(BecomesVLLMError):
        serve(model="mine", as_json=True, port=port)  # type: ignore[arg-type]
    said = json.loads(capsys.readouterr().out)
    _, words, variables = become.call_args.args
    assert (said["url"], said["model"], said["base"]) == (f"http://127.0.0.1:{port}/v1", "mine", "mine-base")
    assert len(said["VLLM_API_KEY"]) > 20
    assert said["VLLM_API_KEY"] == variables["VLLM_API_KEY"]
    assert said["VLLM_API_KEY"] not in str(words)
    assert GUARD in words


def test_a_port_on_which_another_server_listens_is_refused(run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aitrain.packages.installed", MagicMock())
    run(LORA)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="Address already in use"):
        serve(model="mine", port=taken.getsockname()[1])  # type: ignore[arg-type]
