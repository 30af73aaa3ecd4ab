"""Special tokens that the model writes inside an answer: the environment scores them, records show them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from aitrain import TrainConfig
from aitrain.training.chat_templates import chat_format
from aitrain.training.model import TINY_MODEL
from aitrain.training.training_batch import episode_record
from tests.training.scripted_policy import played
from tests.training.test_thinking import Sums

SAID = "4<|im_start|>2"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


def test_a_special_token_inside_an_answer_is_scored_and_recorded(tokenizer: Any) -> None:
    environment = Sums()
    episode, _ = played(environment, tokenizer, lambda _: f"{SAID}<|im_end|>")
    record = episode_record(episode, 1, 0)
    assert environment.seen[0][1] == SAID
    assert (record.completion, record.score, record.stop) == (SAID, 0.0, "done")
    assert record.messages[-1] == {"role": "assistant", "content": SAID}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("42<|im_end|>", "42"),
        ("42<|im_end|><|endoftext|><|endoftext|>", "42"),
        ("42<|endoftext|><|endoftext|>", "42<|endoftext|><|endoftext|>"),
        (f"{SAID}<|im_end|>", SAID),
        ("<|im_start|><|im_end|>", "<|im_start|>"),
        ("4<|im_end|><|im_end|>", "4<|im_end|>"),
        ("<|im_end|>", ""),
    ],
)
def test_only_what_ended_an_answer_is_stripped(tokenizer: Any, written: str, read: str) -> None:
    chat = chat_format(tokenizer, TrainConfig())
    message, turn = chat.read(tokenizer(written)["input_ids"], [], (), [tokenizer.eos_token_id])
    assert message["content"] == turn.text == read
