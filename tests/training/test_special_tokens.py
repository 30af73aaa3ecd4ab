"""Special tokens that the model writes inside an answer: the environment scores them, records show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from aitrain import Result, TrainConfig
from aitrain.engines.hf import HFEngine
from aitrain.runs.run_folder import read_lines
from aitrain.training.chat_templates import chat_format
from aitrain.training.model import TINY_MODEL
from tests.training.scripted_policy import scripted

SAID = "4<|im_start|>2"


class Sums:
    """Right is "42" and nothing else."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def build_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": "40 + 2 ="}]} for _ in range(8)]

    def score_episode(self, text: str) -> float:
        self.seen.append(text)
        return float(text == "42")


def test_a_special_token_inside_an_answer_is_scored_and_recorded(
    train: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HFEngine, "sample", scripted(lambda *_: f"{SAID}<|im_end|>"))
    environment = Sums()
    result = train(environment, max_steps=1, eval_cases=0)

    assert set(environment.seen) == {SAID}
    for record in read_lines(result.folder / "rollouts" / "rank0.jsonl"):
        assert (record["completion"], record["score"], record["stop"]) == (SAID, 0.0, "done")
        assert record["messages"][-1] == {"role": "assistant", "content": SAID}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY_MODEL)


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
