"""Models that are unlike the small one: positions from a table, dropout, quantized bases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from aitrain import Result, TrainConfig
from aitrain.training.model import load_model
from aitrain.training.trainer import EpisodeTrainer
from tests.environments.vowels import Vowels

Train = Callable[..., Result]
CONTEXT = 64


NOISE = {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}


@pytest.fixture
def gpt2(small_model: Path, tmp_path: Path) -> Path:
    """A folder with a model that has a table of positions, as far apart as in trained models, and dropout."""
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1,
        pad_token_id=0, **NOISE,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.transformer.wpe.weight.data.normal_()
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


@pytest.fixture
def trainers(monkeypatch: pytest.MonkeyPatch) -> list[EpisodeTrainer]:
    """The trainers that a test's runs make."""
    made: list[EpisodeTrainer] = []
    make = EpisodeTrainer.__init__

    def noted(self: EpisodeTrainer, *arguments: Any) -> None:
        made.append(self)
        make(self, *arguments)

    monkeypatch.setattr(EpisodeTrainer, "__init__", noted)
    return made


# -- positions and dropout


def test_a_rows_log_probabilities_are_those_that_it_has_without_padding(
    gpt2: Path, train: Train, trainers: list[EpisodeTrainer]
) -> None:
    """Padded on both sides, and to more columns than the model has positions; without the dropout of the base, which
    stays in the saved configuration."""
    result = train(Vowels(4), model=str(gpt2), max_steps=1, eval_cases=0, rl_num_generations=2, rl_kl_coef=0.1)
    assert abs(result.history[0]["kl"]) < 1e-6
    config = AutoModelForCausalLM.from_pretrained(result.model).config
    assert {name: getattr(config, name) for name in NOISE} == NOISE
    trainer = trainers[0]
    trainer.model.eval()

    def log_probs(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            values = [trainer._get_per_token_logps_and_entropies(m, ids, mask, 6)[0] for m in models]
        return torch.cat(values)

    models = (trainer.model, trainer.ref_model)
    row = torch.arange(5, 17)[None]
    for left, right in ((5, 0), (0, 3), (20, 3), (CONTEXT, 0)):
        pads = (left, right)
        padded, mask = (torch.nn.functional.pad(x, pads) for x in (row, torch.ones_like(row)))
        wide = log_probs(padded, mask)[:, : 6 - right]
        assert (wide - log_probs(row, torch.ones_like(row))[:, right:]).abs().max() < 1e-5, pads


# -- precision


def quantized(config: TrainConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Stands in for bitsandbytes, which needs a GPU: bfloat16, and says that it is loaded in 4 bits."""
    model = load_model(config, torch.bfloat16)
    model.is_loaded_in_4bit = True
    return model


def test_an_adapter_on_a_quantized_base_trains_in_float32(
    train: Train, trainers: list[EpisodeTrainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam moves each weight by up to 1e-5 a step, which is too little for bfloat16."""
    monkeypatch.setattr("aitrain.training.preparation.load_model", quantized)
    result = train(Vowels(), peft=True, max_steps=1, eval_cases=0, merge_adapter=False)
    assert not (result.model / "merged").exists()
    adapter = [p for p in trainers[0].model.parameters() if p.requires_grad]
    assert {p.dtype for p in adapter} == {torch.float32}
