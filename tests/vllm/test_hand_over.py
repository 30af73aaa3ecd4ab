"""`aitrain export`, `serve` and `eval` with the real vLLM, driven by OpenAI's client; skipped where it is not there."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain.packages import TINY_FOLDER
from aitrain.runs.result import EvalResult
from tests.conftest import episodes_of, free_port, write
from tests.training.conftest import save_adapter
from tests.vllm import test_colocated
from tests.vllm.test_colocated import aitrain

pytestmark = test_colocated.pytestmark
PROMPTS = ["3+4=", "17+25=", "say", "12+", "aaaa", "90+9="]
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run whose adapter has random weights, and its export."""
    place = tmp_path_factory.mktemp("hand_over")
    save_adapter(TINY_FOLDER, place / "runs/mine/model")
    config = "model: tiny\npeft: true\nmodel_max_length: 256\nrl_env: envs.arithmetic\nrl_max_new_tokens: 8\n"
    write(place / "runs/mine", {"config.yaml": config, "status.json": "{}"})
    aitrain(place, "export", "mine").check_returncode()
    return place


@contextmanager
def serving(folder: Path, model: str) -> Iterator[Any]:
    """OpenAI's client of `aitrain serve MODEL`, which Ctrl-C ends."""
    import openai

    port = free_port()
    command = [sys.executable, "-m", "aitrain", "serve", model, "--json", "--port", str(port)]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        up = json.loads(process.stdout.readline())
        while not is_listening(port):  # until vLLM, which the command has become, is ready
            assert process.poll() is None
            time.sleep(0.2)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=up["url"], api_key="none", max_retries=0).models.list()
        yield openai.OpenAI(base_url=up["url"], api_key=up["VLLM_API_KEY"], max_retries=0)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert not is_listening(port)


def is_listening(port: int) -> bool:
    with socket.socket() as attempt:
        return attempt.connect_ex(("127.0.0.1", port)) == 0


def said_by_vllm(client: Any, model: str) -> list[str]:
    asked = {"model": model, "max_tokens": TOKENS, "temperature": 0, "extra_body": {"skip_special_tokens": False}}
    return [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in PROMPTS]


def said_by_transformers(model: Any) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(TINY_FOLDER)
    end = tokenizer.eos_token or ""
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        made = model.generate(**ids, do_sample=False, max_new_tokens=TOKENS)[0, ids["input_ids"].shape[1] :]
        found.append(tokenizer.decode(made).removesuffix(end))
    return found


def test_the_adapter_and_its_base_are_served_and_say_what_transformers_says(folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(TINY_FOLDER)
    wanted = {"mine-base": said_by_transformers(base)}
    wanted["mine"] = said_by_transformers(PeftModel.from_pretrained(base, str(folder / "runs/mine/model")))
    assert wanted["mine-base"] != wanted["mine"]
    assert said_by_transformers(AutoModelForCausalLM.from_pretrained(folder / "exports/mine")) == wanted["mine"]

    with serving(folder, "mine") as client:
        served = {model.id: model for model in client.models.list().data}
        assert served.keys() == wanted.keys()
        assert served["mine-base"].max_model_len == 256
        assert {name: said_by_vllm(client, name) for name in wanted} == wanted
        message = {"role": "user", "content": "3+4="}
        stream = client.chat.completions.create(model="mine", messages=[message], max_tokens=4, stream=True)
        assert len(list(stream)) > 1


@pytest.mark.slow
def test_an_export_is_served_by_the_name_of_its_run(folder: Path) -> None:
    wanted = said_by_transformers(AutoModelForCausalLM.from_pretrained(folder / "exports/mine"))
    with serving(folder, "exports/mine") as client:
        assert [model.id for model in client.models.list().data] == ["mine"]
        assert said_by_vllm(client, "mine") == wanted


def evaluated(folder: Path, *arguments: str) -> tuple[EvalResult, dict[int, str]]:
    """What `aitrain eval` finds, and the greedy answers by their cases."""
    done = aitrain(folder, "eval", "mine", "--cases=20", "--samples=4", *arguments)
    assert done.returncode == 0, done.stderr
    result = EvalResult.read(folder / done.stdout.rpartition("eval folder: ")[2].strip())
    return result, {one["row_number"]: one["completion"] for one in episodes_of(result.folder, "eval_greedy")}


@pytest.mark.slow
def test_a_lora_run_is_evaluated_through_a_server_as_with_transformers(folder: Path) -> None:
    (plain, said), (served, served_said) = evaluated(folder), evaluated(folder, "--use-vllm")
    assert served_said == said
    assert len(set(said.values())) > 1
    assert served.scores["greedy"] == plain.scores["greedy"]
    assert sum(served.stops["sampled"].values()) == 80
