"""The shipped model."""

from __future__ import annotations

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from aitrain.training.model import TINY_MODEL


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
