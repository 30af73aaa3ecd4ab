"""`aitrain export` and `serve` with the real vLLM, driven by OpenAI's client; skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain.training.model import TINY_MODEL
from tests.conftest import write

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

PROMPTS = ["3+4=", "17+25=", "say", "12+", "aaaa", "90+9="]
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run whose adapter has random weights, and its export."""
    place = tmp_path_factory.mktemp("hand_over")
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(TINY_MODEL), lora).save_pretrained(place / "runs/mine/model")
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(place / "runs/mine/model")
    write(place / "runs/mine", {"config.yaml": "model: tiny\npeft: true\nmodel_max_length: 256\n", "status.json": "{}"})
    subprocess.run([sys.executable, "-m", "aitrain", "export", "mine"], cwd=place, check=True)
    return place


@contextmanager
def serving(folder: Path, model: str) -> Iterator[Any]:
    """OpenAI's client of `aitrain serve MODEL`, which Ctrl-C ends."""
    import openai

    with socket.socket() as attempt:
        attempt.bind(("127.0.0.1", 0))
        port = attempt.getsockname()[1]
    command = [sys.executable, "-m", "aitrain", "serve", model, "--json", "--port", str(port)]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        up = next(said for line in process.stdout if "url" in (said := json.loads(line)))
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=up["url"], api_key="none", max_retries=0).models.list()
        yield openai.OpenAI(base_url=up["url"], api_key=up["VLLM_API_KEY"], max_retries=0)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    with socket.socket() as attempt:
        assert attempt.connect_ex(("127.0.0.1", port)) != 0


def said_by_vllm(client: Any, model: str) -> list[str]:
    asked = {"model": model, "max_tokens": TOKENS, "temperature": 0, "extra_body": {"skip_special_tokens": False}}
    return [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in PROMPTS]


def said_by_transformers(model: Any) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    end = tokenizer.eos_token or ""
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        made = model.generate(**ids, do_sample=False, max_new_tokens=TOKENS)[0, ids["input_ids"].shape[1] :]
        found.append(tokenizer.decode(made).removesuffix(end))
    return found


def test_the_adapter_beside_its_base_and_the_export_say_what_transformers_says(folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    wanted = {"tiny": said_by_transformers(base)}
    wanted["mine"] = said_by_transformers(PeftModel.from_pretrained(base, str(folder / "runs/mine/model")))
    assert wanted["tiny"] != wanted["mine"]
    assert said_by_transformers(AutoModelForCausalLM.from_pretrained(folder / "exports/mine")) == wanted["mine"]

    with serving(folder, "mine") as client:
        served = {model.id: model for model in client.models.list().data}
        assert served.keys() == wanted.keys()
        assert served["tiny"].max_model_len == 256
        assert {name: said_by_vllm(client, name) for name in wanted} == wanted
        message = {"role": "user", "content": "3+4="}
        stream = client.chat.completions.create(model="mine", messages=[message], max_tokens=4, stream=True)
        assert len(list(stream)) > 1

    with serving(folder, "exports/mine") as client:
        assert [model.id for model in client.models.list().data] == ["mine"]
        assert said_by_vllm(client, "mine") == wanted["mine"]
