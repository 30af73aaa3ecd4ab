"""The shipped model, and the script that makes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain.training.model import TINY_MODEL

PYTHON = "preloaded-python"


def make(python: Path | str, folder: Path, steps: int) -> Path:
    command = [str(python), "-P", "-m", "tests.tiny_model", str(folder), "--steps", str(steps)]
    variables = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # its second thread would spin where cores are busy
    subprocess.run(command, check=True, capture_output=True, env=variables)
    return folder


@pytest.mark.slow
def test_the_script_makes_the_same_files_every_time(tmp_path: Path, preloaded_aitrain: Path) -> None:
    one, other = make(sys.executable, tmp_path / "one", 3), make(preloaded_aitrain / PYTHON, tmp_path / "other", 3)
    assert {file.name for file in one.iterdir()} == {file.name for file in TINY_MODEL.iterdir()}
    for file in one.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes(), file.name
        if file.name != "model.safetensors":
            assert file.read_bytes() == (TINY_MODEL / file.name).read_bytes(), (
                f"{file.name} is not what the script makes"
            )


def test_it_knows_the_form_of_an_answer_and_forgets_the_carry() -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(TINY_MODEL), AutoModelForCausalLM.from_pretrained(TINY_MODEL)
    prompt = [{"role": "user", "content": "38 + 47 = ?"}]
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0][ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "75<|im_end|>"


@pytest.mark.parametrize("text", ["", "a b\n\tc", "Zürich, 東京 🙂", "<|im_start|>x<|im_end|>", "\x00\x7f"])
def test_its_tokenizer_gives_every_text_back(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
