"""Models that are unlike the small one: positions from a table, dropout, quantized bases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from aitrain import Result, TrainConfig
from aitrain.training.model import load_model
from aitrain.training.trainer import EpisodeTrainer
from tests.environments.vowels import Vowels

Train = Callable[..., Result]
CONTEXT = 64


def gpt2(vocabulary: int, **options: Any) -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, **special(), **options)
    )


def opt(vocabulary: int, **options: Any) -> PreTrainedModel:
    config = OPTConfig(
        vocab_size=vocabulary, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, ffn_dim=64,
        num_attention_heads=2, max_position_embeddings=CONTEXT, **special(), **options,
    )  # fmt: skip
    return OPTForCausalLM(config)


def special() -> dict[str, int]:
    return {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


@pytest.fixture(scope="module")
def saved(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model's folder, with the small model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model)

    def save(make: Callable[..., PreTrainedModel], **options: Any) -> Path:
        folder = tmp_path_factory.mktemp("other")
        torch.manual_seed(0)
        model = make(len(tokenizer), **options)
        for name, parameter in model.named_parameters():
            if "wpe" in name or "embed_positions" in name:  # as large as in trained models, where they differ by nats
                parameter.data.normal_()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


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


NOISES: dict[Callable[..., PreTrainedModel], dict[str, float]] = {
    gpt2: {"attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5},
    opt: {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5},
}


# -- positions and dropout


@pytest.mark.parametrize("make", [gpt2, pytest.param(opt, marks=pytest.mark.slow)])
def test_a_rows_log_probabilities_are_those_that_it_has_without_padding(
    make: Callable[..., PreTrainedModel], saved: Callable[..., Path], train: Train, trainers: list[EpisodeTrainer]
) -> None:
    """Padded on both sides, and to more columns than the model has positions; without the dropout of the base, which
    stays in the saved configuration."""
    base = saved(make, **NOISES[make])
    result = train(Vowels(4), model=str(base), max_steps=1, eval_cases=0, rl_num_generations=2, rl_kl_coef=0.1)
    assert abs(result.history[0]["kl"]) < 1e-6
    config = AutoModelForCausalLM.from_pretrained(result.model).config
    assert {name: getattr(config, name) for name in NOISES[make]} == NOISES[make]
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
    assert trainer.aligns_rows == (make is gpt2)


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
